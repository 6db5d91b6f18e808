"""The stages of a compilation, each checked against the one before: capture, partition, regions, Inductor.

``model_steps`` runs a step of a model in the ways to compare; ``fxpasses.checking.model`` goes through the stages.
"""
