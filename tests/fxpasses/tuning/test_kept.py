"""What is kept of tuning on disk, and what is left aside of it."""

import json

from fxpasses.tuning.kept import Kept, Place
from fxpasses.tuning.tuning_ledger import Entry


def test_files_that_are_damaged_or_that_others_may_write_to_are_left_aside(tmp_path):
    place = Place.under(str(tmp_path), "g", "f", {"torch": "1"})
    place.write(Kept("g", (), (Entry("g", "a", "no gain", ratio=1.0, low=0.9, high=1.1),)))
    assert place.read()[0].entries[0].measured == "1.00 [0.90, 1.10]"
    assert Place.under(str(tmp_path), "other size", "f", {"torch": "1"}).read()[1] is False
    assert Place.under(str(tmp_path), "g", "f", {"torch": "2"}).read() is None
    (path,) = (tmp_path / "tuned").glob("*/*.json")
    entries = [Entry("h", "b", "kept", ratio=ratio) for ratio in (0.5, 0.7, 0.8)]
    other = Place.under(str(tmp_path), "h", "another family", {"torch": "1"})
    other.write(Kept("h", (), (*entries, Entry("h", "c", "loses", ratio=1.2)), {"torch": "1"}))
    assert place.gained() == {"b": 0.7}
    assert Place.under(str(tmp_path), "g", "f", {"torch": "2"}).gained() == {}
    assert Place.under("off", "g", "f", {}).gained() == {}
    other.file.unlink()
    data = json.loads(path.read_text())
    others = [{"format": 0}, {"entries": [{"x": 1}]}, {"graph": None}, {"steps": [None]}, {"steps": 3}]
    others += [{"ratio": ["x"]}, {"entries": [{**data["entries"][0], "ratio": "1.0"}]}]
    damaged = [json.dumps({**data, **other}) for other in others]
    for text in ("{", "[]", "[" * 100_000, *damaged):
        path.write_text(text)
        assert place.read() is None
    path.write_text(json.dumps(data))
    assert place.read() is not None
    path.chmod(0o666)
    assert place.read() is None
    assert Place.under("off", "g", "f", {}).read() is None
