"""Members of an ensemble: the protocol, and one module or package per kind."""
