"""Titan's planner: a YAML spec of a model, a cluster and a job in, a reviewed and verified plan out. Never imports torch."""

__version__ = "0.1.0"
