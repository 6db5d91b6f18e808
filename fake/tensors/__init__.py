"""Fake tensors: their metadata, the tensor class, and conversion from tensors with data.

``tensor`` has the class, ``metadata`` what operators can tell apart, ``convert`` the conversion, and ``modules``
what ``module.to(...)`` needs.
"""
