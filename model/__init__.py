"""The transformer, its cache, its sampling, and what it reads and writes."""
