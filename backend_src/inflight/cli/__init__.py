"""The command line and the supervisor; see README.md of this folder."""
