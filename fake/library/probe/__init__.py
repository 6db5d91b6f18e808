FakeRule = probe = None
