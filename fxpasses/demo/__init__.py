"""The demo: train a small GPT through the backend, next to eager and Inductor, and compare.

* ``gpt.py``: the model
* ``data.py``: its training text, the source of Python's standard library
* ``training.py``: the same training steps for each contestant
* ``close_results.py``: whether they agree, as closely as float32 allows
* ``show.py``: the tables
"""
