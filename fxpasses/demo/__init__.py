"""The main job: train a small GPT through the backend, next to eager and to Inductor, and compare.

* ``gpt.py``: the model
* ``data.py``: its text, the source of Python's standard library
* ``training.py``: the same steps for each contestant
* ``close_results.py``: whether they agree, as closely as float32 allows
* ``show.py``: the tables
"""
