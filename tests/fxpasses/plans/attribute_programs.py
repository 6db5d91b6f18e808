"""Methods of plain objects whose attributes change between calls and processes, compared with eager."""

import copy
import dataclasses
import operator
import types

import torch
from torch import nn

X = torch.arange(12.0).reshape(3, 4) / 7
GET = operator.attrgetter("a")
CASES = {}


class Plain:
    def __init__(self, attributes):
        vars(self).update(attributes)


@dataclasses.dataclass
class Counted:
    value: float = 2.0
    count: int = 0


@dataclasses.dataclass(frozen=True)
class Key:
    value: float = 2.0


def changed(**values):
    return lambda owner: vars(owner).update(copy.deepcopy(values))


def case(*changes, base=Plain, first, then, arguments=lambda owner: [X], warm=True):
    """A method of an object.

    Args:
        changes: of the object, each before a call; None for nothing.
        base: the class.
        first: its attributes.
        then: those that it has in another process.
        arguments: of its calls, in turn.
        warm: whether another process with the same attributes compiles nothing.
    """

    def add(method):
        kind = type(f"Of_{method.__name__}", (base,), {"run": method, "__module__": __name__})
        CASES[method.__name__] = kind, changes, first, then, arguments, warm
        return method

    return add


def run(name, compiled, *, later=False):
    """What the calls return, and the object is afterwards. Args: the case, what compiles its method, and whether this is the other process."""
    kind, changes, first, then, arguments, _ = CASES[name]
    owner = kind(copy.deepcopy(then if later else first))
    method, found = compiled(owner.run), []
    given = arguments(owner)
    for i, change in enumerate(changes):
        if change is not None:
            change(owner)
        result = method(given[i % len(given)].clone() if len(given) == 1 else given[i % len(given)])
        results = result if isinstance(result, tuple) else (result,)
        if results[0] is not None and isinstance(results[0], torch.Tensor) and results[0].requires_grad:
            results[0].sum().backward()
        found.append([torch.as_tensor(one).detach().clone() for one in results])
        found.append(
            [torch.as_tensor(one) for one in vars(owner).values() if type(one) in (int, float, bool)]
        )
    return found


INTEGERS = tuple(changed(n=n) for n in (0, 1, 2, 3, 7, -3, 0, 100, 2**40, 2**61, 4.5, True, 6))


@case(None, changed(a=3.0), None, changed(a=2.0), first={"a": 2.0}, then={"a": 5.0})
def a_float(self, x):
    return x * self.a


@case(
    None,
    None,
    changed(log=[1, 2], n=3, m={"k": 2.0}),
    None,
    first={"a": 2.0, "log": [], "n": 0, "m": {}},
    then={"a": 2.0, "log": [0.5], "n": 9, "m": {}},
)
def what_no_code_names(self, x):
    return x * self.a


@case(
    None,
    changed(b=1),
    None,
    lambda owner: delattr(owner, "b"),
    None,
    first={"a": 2.0},
    then={"a": 2.0, "b": 1},
)
def one_that_may_be_there(self, x):
    return x * 2 if hasattr(self, "b") else x * 3


@case(None, changed(b=4.0), None, first={"a": 2.0}, then={"a": 2.0, "b": 7.0})
def one_with_a_default(self, x):
    return x * getattr(self, "b", 1.5)


@case(
    None,
    changed(which="b"),
    changed(b=9.0),
    first={"which": "a", "a": 2.0, "b": 3.0},
    then={"which": "b", "a": 2.0, "b": 4.0},
)
def one_by_a_name_that_is_held(self, x):
    return x * getattr(self, self.which)


@case(None, changed(l1=9.0), first={"l0": 2.0, "l1": 3.0}, then={"l0": 2.0, "l1": 4.0})
def some_by_names_that_are_made(self, x):
    for i in range(2):
        x = x * getattr(self, f"l{i}")
    return x


class WithMethod(Plain):
    scale = 2.0

    def help(self, x):
        return x + 1


@case(
    None,
    changed(help=torch.neg),
    None,
    lambda owner: delattr(owner, "help"),
    base=WithMethod,
    first={},
    then={"help": torch.exp},
)
def a_method_in_whose_place_there_is_another(self, x):
    return self.help(x)


@case(
    None,
    changed(scale=4.0),
    None,
    lambda owner: delattr(owner, "scale"),
    base=WithMethod,
    first={},
    then={"scale": 9.0},
)
def an_attribute_of_the_class(self, x):
    return x * self.scale


class Delegating(Plain):
    def __getattr__(self, name):
        if name in self.__dict__.get("inner", {}):
            return self.__dict__["inner"][name]
        raise AttributeError(name)


@case(
    None,
    lambda owner: owner.inner.update(s=5.0),
    None,
    changed(s=3.0),
    base=Delegating,
    first={"inner": {"s": 2.0}},
    then={"inner": {"s": 8.0}},
)
def one_that_another_answers(self, x):
    return x * self.s


class Renaming(Plain):
    names = {"s": "scale"}

    def __getattribute__(self, name):
        names = super().__getattribute__("names")
        return super().__getattribute__(names.get(name, name))


@case(None, changed(scale=5.0), None, base=Renaming, first={"scale": 2.0}, then={"scale": 8.0})
def one_by_another_name(self, x):
    return x * self.s


@case(
    None,
    lambda owner: vars(owner.inner).update(s=5.0),
    None,
    first={"inner": Plain({"s": 2.0})},
    then={"inner": Plain({"s": 8.0})},
)
def one_of_another_object(self, x):
    return x * self.inner.s


@case(
    None,
    lambda owner: vars(owner.inner).update(s=5.0),
    lambda owner: vars(owner.inner).update(t=5.0),
    None,
    lambda owner: vars(owner).update(inner=types.SimpleNamespace(s=7.0)),
    first={"inner": types.SimpleNamespace(s=2.0)},
    then={"inner": types.SimpleNamespace(s=8.0)},
)
def one_of_a_namespace(self, x):
    return x * self.inner.s + hasattr(self.inner, "t")


@case(
    None,
    lambda owner: owner.sizes.append(2.0),
    None,
    lambda owner: owner.sizes.pop(0),
    first={"sizes": [2.0, 3.0]},
    then={"sizes": [3.0, 3.0]},
)
def a_list(self, x):
    for size in self.sizes:
        x = x * size
    return x


@case(
    None,
    lambda owner: owner.table.update(k=5.0),
    None,
    lambda owner: owner.table.update(z=5.0),
    first={"table": {"k": 2.0}},
    then={"table": {"k": 4.0}},
)
def a_dictionary(self, x):
    return x * self.table["k"] + len(self.table)


@case(
    None,
    changed(w=torch.ones(4) * 5),
    None,
    lambda owner: owner.w.mul_(2),
    changed(w=torch.ones(3, 1)),
    first={"w": torch.ones(4)},
    then={"w": torch.ones(4) * 3},
)
def a_tensor(self, x):
    return x * self.w


@case(
    None,
    None,
    None,
    arguments=lambda owner: [owner.w, torch.ones(4)],
    first={"w": torch.ones(4)},
    then={"w": torch.ones(4)},
)
def a_tensor_that_is_the_argument(self, x):
    return x * self.w + (1 if x is self.w else 0)


@case(
    None,
    None,
    arguments=lambda owner: [torch.ones(4), owner.w],
    first={"w": torch.ones(4)},
    then={"w": torch.ones(4)},
    warm=False,
)
def a_tensor_that_is_changed(self, x):
    self.w.add_(1)
    return x * self.w


@case(None, changed(f=torch.cos), None, first={"f": torch.sin}, then={"f": torch.exp})
def a_function(self, x):
    return self.f(x)


@case(None, changed(m=nn.Tanh()), None, first={"m": nn.ReLU()}, then={"m": nn.Sigmoid()})
def a_module(self, x):
    return self.m(x - 1)


@case(*INTEGERS, first={"n": 0}, then={"n": 5}, warm=False)
def an_integer(self, x):
    return x * self.n


@case(*INTEGERS[:8], first={"n": 0}, then={"n": 5})
def a_counter(self, x):
    self.n += 1
    return x + self.n


@case(*INTEGERS, first={"n": 0}, then={"n": 5}, warm=False)
def a_counter_that_decides(self, x):
    self.n += 1
    return x * 2 if self.n % 3 == 0 else x * 5


@case(*INTEGERS[:8], first={"n": 0}, then={"n": 5}, warm=False)
def a_counter_and_no_tensor(self, x):
    self.n = self.n + 1
    return self.n


@case(*(changed(n=n) for n in (2, 3, 4, 6, 12)), first={"n": 1}, then={"n": 2}, warm=False)
def an_integer_that_is_a_size(self, x):
    return x.reshape(self.n, -1).sum(0) * 2


@case(
    *(changed(n=n, m=m) for n, m in ((2, 3), (3, 3), (4, 4), (4, 9), (9, 4))),
    first={"n": 1, "m": 2},
    then={"n": 2, "m": 5},
    warm=False,
)
def two_integers_that_are_compared(self, x):
    return x * self.n if self.n < self.m else x - self.m


def _count(owner):
    owner.a.n += 1


@case(
    None,
    _count,
    _count,
    _count,
    lambda owner: vars(owner.b).update(n=9),
    first={"a": Plain({"n": 2}), "b": Plain({"n": 3})},
    then={"a": Plain({"n": 2}), "b": Plain({"n": 4})},
)
def integers_of_two_objects(self, x):
    return x * self.a.n - (1 if self.b.n == 3 else 2)


@case(
    None,
    lambda owner: vars(owner.a).update(s=5.0),
    lambda owner: vars(owner).update(b=Plain({"s": 2.0})),
    first=(lambda one: {"a": one, "b": one})(Plain({"s": 2.0})),
    then={"a": Plain({"s": 2.0}), "b": Plain({"s": 2.0})},
)
def one_object_with_two_names(self, x):
    return x * self.a.s + self.b.s + (1 if self.a is self.b else 0)


@case(
    None,
    lambda owner: vars(owner.d).update(value=4.0),
    lambda owner: vars(owner.d).update(count=4),
    first={"d": Counted()},
    then={"d": Counted(5.0)},
)
def a_dataclass(self, x):
    return x * self.d.value


@case(
    None,
    lambda owner: vars(owner.d).update(count=4),
    first={"d": Counted(), "e": Counted()},
    then={"d": Counted(5.0), "e": Counted()},
    warm=False,
)
def dataclasses_that_are_compared(self, x):
    return x * (2 if self.d == self.e else 3)


@case(
    None,
    changed(k=Key(4.0)),
    None,
    first={"k": Key(), "t": {Key(): 3.0, Key(4.0): 5.0}},
    then={"k": Key(4.0), "t": {Key(): 3.0, Key(4.0): 5.0}},
    warm=False,
)
def an_object_that_is_a_key(self, x):
    return x * self.t[self.k]


@case(None, changed(a=3.0), None, first={"a": 2.0}, then={"a": 5.0}, warm=False)
def one_by_way_of_its_dictionary(self, x):
    return x * self.__dict__["a"]


@case(None, changed(a=3.0), None, first={"a": 2.0}, then={"a": 5.0}, warm=False)
def one_by_a_getter(self, x):
    return x * GET(self)


@case(None, changed(a=3.0), None, first={"a": 2.0}, then={"a": 5.0}, warm=False)
def one_of_a_copy(self, x):
    return x * copy.copy(self).a


@case(
    None,
    changed(done=None),
    changed(done=0),
    changed(done=False),
    None,
    first={"done": True},
    then={"done": False},
)
def one_that_is_set(self, x):
    self.done = True
    return x * 2


@case(*INTEGERS[:8], first={"n": 0}, then={"n": 5})
def a_counter_behind_a_graph_break(self, x):
    y = x * 2
    torch._dynamo.graph_break()
    self.n += 1
    return y + self.n


@case(None, None, None, None, None, first={"log": [], "n": 0}, then={"log": [1.0], "n": 4})
def a_history_behind_a_graph_break(self, x):
    y = x * 2
    torch._dynamo.graph_break()
    self.n += 1
    return y


@case(
    *(changed(n=n) for n in (0, 1, 2, 3, 30)),
    first={"n": 0, "w": nn.Parameter(torch.ones(4))},
    then={"n": 5, "w": nn.Parameter(torch.ones(4))},
)
def a_counter_in_training(self, x):
    self.n += 1
    return (x * self.w).square().sum() * self.n


SIZES = [X, X[:2], X.repeat(2, 1), X[:1]]


@case(
    *(changed(n=n) for n in (0, 1, 2, 3, 4, 30)),
    arguments=lambda owner: SIZES,
    first={"n": 0},
    then={"n": 5},
    warm=False,
)
def a_counter_and_sizes(self, x):
    return x.sum(0) * self.n + x.shape[0]


@case(None, None, None, None, None, arguments=lambda owner: SIZES, first={}, then={}, warm=False)
def a_size_before_a_graph_break(self, x):
    size = x.shape[0] * 2
    torch._dynamo.graph_break()
    return x + size


@case(None, None, None, None, None, arguments=lambda owner: SIZES, first={}, then={}, warm=False)
def a_branch_on_a_size_before_a_graph_break(self, x):
    more = 5 if x.shape[0] > 2 else 7
    torch._dynamo.graph_break()
    return x + more
