"""Tokenizer, chat template and streaming detokenizer; see README.md of this folder."""
