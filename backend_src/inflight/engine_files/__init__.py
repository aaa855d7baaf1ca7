"""Built engines on disk: prepacked weights and what proves them. See README.md of this folder."""
