"""MA-JEPA: joint-embedding predictive world models for cooperative multi-agent RL."""

from .envs import make_env as make_env

__version__ = "0.1.0"
