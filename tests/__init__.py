"""A package of its own name, so that no package ``tests`` of another project is taken for it."""
