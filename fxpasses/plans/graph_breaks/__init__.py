"""Code between graphs: the frames that Dynamo breaks, what they go on with, and what they call in between."""
