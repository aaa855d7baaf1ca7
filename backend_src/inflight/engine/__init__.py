"""The engine: one conductor that turns plans into forwards and forwards into responses."""
