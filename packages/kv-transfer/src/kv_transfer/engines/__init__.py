"""Transfer engines, one a module; each is imported only when it is created."""
