def describe_capture(capture, graph):
    pass
