"""The two packaged models, for tests marked ``real_models``."""

BOTH = ("bundled:smollm2-135m-instruct", "bundled:gemma-3-270m")
