"""Pattern rewriting: patterns and replacements are plain Python functions."""

from fxpasses.patterns.pattern_pass import Match, NoMatchWarning, PatternPass, pattern_pass, replace_pattern

__all__ = ["Match", "NoMatchWarning", "PatternPass", "pattern_pass", "replace_pattern"]
