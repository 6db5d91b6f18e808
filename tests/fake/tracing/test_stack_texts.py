"""Texts of stack traces are those that Python makes, and a line is parsed once."""

import linecache
import traceback

import fake


def texts(frame):
    return traceback.StackSummary.from_list([frame]).format()


def test_texts_are_pythons_and_a_changed_line_is_read_again(tmp_path):
    file = tmp_path / "notebook.py"
    for line in ("a = b + c", "a = b @ other  # longer"):
        file.write_text(line + "\n")
        linecache.checkcache(str(file))

        def frame(end, file=file):
            return traceback.FrameSummary(str(file), 1, "cell", end_lineno=1, colno=4, end_colno=end)

        expected = [texts(frame(len(line))), texts(frame(5))]
        assert line in expected[0][0]
        assert expected[0] != expected[1]
        with fake.accelerate():
            for _ in range(2):
                assert [texts(frame(len(line))), texts(frame(5))] == expected


def test_local_variables_are_not_remembered():
    def text(value):
        return texts(traceback.FrameSummary("f.py", 1, "f", locals={"x": value}, lookup_line=False))

    with fake.accelerate():
        assert text(1) != text(2)
