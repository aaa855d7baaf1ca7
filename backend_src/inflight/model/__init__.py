"""Packed rows in, logits out. See README.md of this folder. Importing this imports no torch."""
