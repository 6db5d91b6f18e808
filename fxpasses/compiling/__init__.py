"""One Dynamo graph on its way to Inductor: options, stages, hand-over, and the same stages recorded."""
