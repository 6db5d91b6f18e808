"""Rewriting by pattern: what to look for, and what to put in its place, as plain Python functions."""

from fxpasses.patterns.pattern_pass import Match, NoMatchWarning, PatternPass, pattern_pass, replace_pattern

__all__ = ["Match", "NoMatchWarning", "PatternPass", "pattern_pass", "replace_pattern"]
