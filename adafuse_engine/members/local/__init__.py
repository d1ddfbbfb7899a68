"""Members on local weights: the only place that imports torch and transformers."""
