"""Python objects that a plan depends on: what they are, where they come from, and what traced code reads of them.

``watched_state`` is the check before each call: whether any object of a walk may have changed. ``walks`` visits
the objects; nothing here does.
"""
