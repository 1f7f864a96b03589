"""Owns the shapes of engines' calls: what an engine passes, turned into this package's ops. It imports no engine."""
