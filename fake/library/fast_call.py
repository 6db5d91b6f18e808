"""Call a custom operator without the dispatcher, where the dispatcher would do nothing unusual.

For each operator one Python function is generated from its schema. It checks that

* every tensor is a plain `torch.Tensor` or `Parameter` whose dispatch keys are those of an ordinary dense
  tensor on a device that has a kernel (this excludes fake, sparse, conjugated, negated, functorch,
  inference... tensors),
* the thread's dispatcher state is the default (this excludes modes, vmap, tracing, autocast, inference
  mode...),
* no torch function mode, no profiler and no Dynamo frame hook is active,
* every other argument already has the Python type that the dispatcher would convert it to,
* no other code registered a kernel for this operator behind our back,

and then does what the dispatcher would do: version bumps, autograd node, kernel below autograd, return and
alias checks. In every other case it calls the dispatcher. `tests/fake/library/test_fast_call.py` compares
both.

The first two checks take a third of the time. If all tensors are required arguments, one Dynamo guard on the
tensors of the last call that passed checks both: types, dimension counts, and the keys that the dispatcher
would compute in this thread.
"""

from __future__ import annotations

import keyword
import linecache
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from fake.library.autograd import make_function
from fake.library.call_arguments import (
    INT_MAX,
    INT_MIN,
    LISTS,
    MISSING,
    PLAIN,
    SCALAR_TESTS,
    FastCallable,
    any_requires_grad,
    call_dispatcher,
    plain_list,
)
from fake.library.errors import OutputAliasError
from fake.library.returns import check_result
from fake.library.schema import mutated_arguments
from fake.seam import library as _torch

_NO_MATCH = (lambda *_: False, None)
_REBUILD_INTERVAL = 64
"""Guards are rebuilt for this many calls whose tensors differ from the last; after that, once in as many."""


class _Source:
    """Collects the lines of the generated function."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.namespace: dict[str, Any] = {}
        self.slow = ""
        self.first_tensor = True

    def test(self, condition: str, *, indent: str = "    ") -> None:
        self.lines.append(f"{indent}if not ({condition}): return {self.slow}")

    def tensor(self, name: str, *, indent: str = "    ") -> None:
        add = self.lines.append
        add(f"{indent}_t = type({name})")
        add(f"{indent}if _t is not _Tensor and _t is not _Parameter: return {self.slow}")
        if self.first_tensor:
            add(f"{indent}_key = _dispatch_keys({name}).raw_repr()")
        else:
            add(f"{indent}if _dispatch_keys({name}).raw_repr() != _key: return {self.slow}")
        self.first_tensor = False


class FastCall:
    """Builds and refreshes the fast path of one operator.

    Attributes:
        function: the generated ``__call__``, or None if the schema needs something that only the dispatcher
            handles (no tensor argument, view or in-place returns, types without a check here).
        source: its source text.
    """

    def __init__(self, op: FastCallable) -> None:
        self._op = op
        self._kernels: dict[int, Callable[..., Any]] = {}
        self._namespace: dict[str, Any] = {}
        self._table = ""
        self._mismatches = 0
        self.function: FunctionType | None = None
        self.source = ""
        self._generate()

    # --- building ----------------------------------------------------------------------------------
    def _supported(self) -> bool:
        schema = self._op._opoverload._schema
        if _torch.is_view_schema(schema) or any(r.alias_info is not None for r in schema.returns):
            return False
        if self._op._returns_one_tuple or not all(
            str(r.type) in ("Tensor", "List[Tensor]") for r in schema.returns
        ):
            return False
        if len(schema.returns) > 1 and any(str(r.type) != "Tensor" for r in schema.returns):
            return False
        names = [a.name for a in schema.arguments]
        if any(keyword.iskeyword(n) or n.startswith("_") for n in names):
            return False
        kinds = [self._op._argument_types[a.name] for a in schema.arguments]
        known = {"Tensor", "List[Tensor]", "ScalarType", *SCALAR_TESTS, *LISTS}
        required_tensor = any(kind == "Tensor" and not optional for kind, optional in kinds)
        return required_tensor and all(kind in known for kind, _ in kinds)

    def _generate(self) -> None:
        """Write and compile the function: its parameters, the checks, and the run of the kernel."""
        op = self._op
        if not self._supported():
            return
        arguments = list(op._opoverload._schema.arguments)
        positional = [a for a in arguments if not a.kwarg_only]
        keyword_only = [a for a in arguments if a.kwarg_only]
        source = _Source()
        values = "(" + "".join(f"{a.name}, " for a in positional) + ")"
        keywords = "{" + ", ".join(f"{a.name!r}: {a.name}" for a in keyword_only) + "}"
        source.slow = f"_slow(_op, {values}, {keywords}, _extra, _unknown)"
        self._emit_checks(source, arguments)
        self._emit_run(source, positional, keyword_only)

        parameters = ["_op"]
        parameters += [f"{a.name}=_default_{a.name}" for a in positional]
        parameters.append("*_extra")
        parameters += [f"{a.name}=_default_{a.name}" for a in keyword_only]
        parameters.append("**_unknown")
        defaults = dict(op._python_defaults)
        for argument in arguments:
            source.namespace[f"_default_{argument.name}"] = defaults.get(argument.name, MISSING)
        head = [
            f"def __call__({', '.join(parameters)}):",
            "    if _compiling() or _function_mode() or _profiling() or _frame_hook() is not None or _extra or _unknown:",
            f"        return {source.slow}",
        ]
        self.source = "\n".join(head + source.lines) + "\n"
        self._namespace = {**source.namespace, **self._names()}
        filename = f"<fake.library call of {op.qualname}>"
        exec(compile(self.source, filename, "exec"), self._namespace)
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(keepends=True), filename)
        self.function = self._namespace["__call__"]

    def _emit_checks(self, source: _Source, arguments: list[Any]) -> None:
        types = self._op._argument_types
        # The tensor that decides the dispatch keys comes first.
        tensors = [a for a in arguments if types[a.name] == ("Tensor", False)]
        rest = [a for a in arguments if a not in tensors]
        add = source.lines.append
        tensor_names = ", ".join(argument.name for argument in tensors)
        plain = all("Tensor" not in types[argument.name][0] for argument in rest)
        if plain:
            add("    _same, _kernel = _last")
            add(f"    if len(_registrations) != _registered or not _same({tensor_names}):")
        inner = "        " if plain else "    "
        for argument in tensors:
            source.tensor(argument.name, indent=inner)
        if not plain:
            for argument in rest:
                self._emit_check(source, argument)
        add(f"{inner}_kernel = _kernels.get(_key)")
        add(f"{inner}if _kernel is None or len(_registrations) != _registered:")
        add(f"{inner}    _admit_keys({tensors[0].name})")
        add(f"{inner}    return {source.slow}")
        source.test("_include().raw_repr() == _INCLUDE and _exclude().raw_repr() == _EXCLUDE", indent=inner)
        if plain:
            add(f"{inner}_cache_check(_kernel, {tensor_names})")
            for argument in rest:
                self._emit_check(source, argument)

    def _names(self) -> dict[str, Any]:
        """Return what the names in the source stand for, besides defaults of parameters."""
        return {
            "_INCLUDE": 0,
            "_EXCLUDE": 0,
            "_INT_MAX": INT_MAX,
            "_INT_MIN": INT_MIN,
            "_Parameter": torch.nn.Parameter,
            "_Tensor": torch.Tensor,
            "_alias": _torch.any_output_is_alias,
            "_below_autograd": _torch.BelowAutograd,
            "_below_mutation": _torch.BelowMutation,
            "_bump": _torch.increment_version,
            "_compiling": torch.compiler.is_dynamo_compiling,
            "_device": torch.device,
            "_dispatch_keys": _torch.dispatch_keys,
            "_dtype": torch.dtype,
            "_empty": {},
            "_exclude": _torch.local_exclude_set,
            "_frame_hook": _torch.eval_frame_callback,
            "_function_mode": _torch.torch_function_mode_enabled,
            "_grad_enabled": torch.is_grad_enabled,
            "_include": _torch.local_include_set,
            "_kernels": self._kernels,
            "_last": _NO_MATCH,
            "_admit_keys": self._admit_keys,
            "_plain_list": plain_list,
            "_profiling": _torch.profiler_enabled,
            "_registrations": _torch.python_registrations,
            "_cache_check": self._cache_check,
            "_registered": -1,
            "_slow": call_dispatcher,
            "_wrong_output": self._wrong_output,
            "_alias_error": self._alias_error,
            "_require_grad": any_requires_grad,
            **dict(LISTS.values()),
        }

    def _emit_check(self, source: _Source, argument: Any) -> None:
        name = argument.name
        kind, optional = self._op._argument_types[name]
        guard = f"{name} is None or " if optional else ""
        if kind == "Tensor":
            source.lines.append(f"    if {name} is not None:")
            source.tensor(name, indent="        ")
        elif kind == "List[Tensor]":
            source.lines.append(f"    if {'True' if not optional else f'{name} is not None'}:")
            source.lines.append(f"        _{name} = _plain_list({name}, _key)")
            source.lines.append(f"        if _{name} is None: return {source.slow}")
            source.lines.append(f"    else: _{name} = None")
        elif kind in LISTS:
            source.lines.append(f"    if {'True' if not optional else f'{name} is not None'}:")
            source.lines.append(f"        _{name} = {LISTS[kind][0]}({name})")
            source.lines.append(f"        if _{name} is None: return {source.slow}")
            source.lines.append(f"    else: _{name} = None")
        elif kind == "ScalarType":
            source.test(f"{guard}type({name}) is _dtype")
        else:
            source.test(guard + SCALAR_TESTS[kind].format(name))

    def _emit_run(self, source: _Source, positional: list[Any], keyword_only: list[Any]) -> None:
        op = self._op
        schema = op._opoverload._schema
        types = op._argument_types

        def passed(argument: Any) -> str:
            kind = types[argument.name][0]
            return f"_{argument.name}" if kind in LISTS or kind == "List[Tensor]" else argument.name

        tensors = [a.name for a in schema.arguments if types[a.name] == ("Tensor", False)]
        optional_tensors = [a.name for a in schema.arguments if types[a.name] == ("Tensor", True)]
        lists = [f"_{a.name}" for a in schema.arguments if types[a.name][0] == "List[Tensor]"]
        mutated = mutated_arguments(schema)
        args = "".join(f"{passed(a)}, " for a in positional)
        kwargs = ", ".join(f"{a.name}={passed(a)}" for a in keyword_only)
        keyword_dict = "{" + ", ".join(f"{a.name!r}: {passed(a)}" for a in keyword_only) + "}"
        requires = [f"{n}.requires_grad" for n in tensors]
        requires += [f"({n} is not None and {n}.requires_grad)" for n in optional_tensors]
        requires += [f"_require_grad({n})" for n in lists]

        add = source.lines.append
        if not op.differentiable:
            pass
        elif mutated or lists or any(str(r.type) == "List[Tensor]" for r in schema.returns):
            # Rare and intricate enough to leave to the dispatcher.
            add(f"    if _grad_enabled() and ({' or '.join(requires)}): return {source.slow}")
        else:
            add(f"    if ({' or '.join(requires)}) and _grad_enabled():")
            add(f"        return _apply({args}(_kernel, {keyword_dict if keyword_only else '_empty'}))")
        for name in mutated:
            kind, optional = types[name]
            value = f"({name},)" if kind == "Tensor" else f"_{name}"
            add(f"    {f'if {name} is not None: ' if optional else ''}_bump({value})")
        if mutated and _torch.BelowMutation is not _torch.BelowAutograd:
            add("    with _below_mutation():")
            add(f"        _result = _kernel({args}{kwargs})")
        else:
            # Dropping the guard costs half as much as leaving a `with` block.
            add("    _guard = _below_autograd()")
            add("    try:")
            add(f"        _result = _kernel({args}{kwargs})")
            add("    finally:")
            add("        del _guard")
        inputs = "(" + "".join(f"{n}, " for n in (*tensors, *optional_tensors, *lists)) + ")"
        if len(schema.returns) == 0:
            add("    if _result is not None: _result = _wrong_output(_result)")
        elif len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor":
            add("    if type(_result) is not _Tensor: _result = _wrong_output(_result)")
            add(f"    if _alias({inputs}, _empty, (_result,)): _alias_error()")
        else:
            add("    _result = _wrong_output(_result)")
            many = "_result" if len(schema.returns) > 1 else "(_result,)"
            add(f"    if _alias({inputs}, _empty, {many}): _alias_error()")
        add("    return _result")

    # --- keeping it true ---------------------------------------------------------------------------
    def refresh(self) -> None:
        """Drop what is cached about kernels; call after every registration for this operator."""
        if self.function is None:
            return
        op = self._op
        self._kernels.clear()
        self._namespace["_last"] = _NO_MATCH
        self._table = _torch.dispatch_table(op.qualname)
        self._namespace["_registered"] = len(_torch.python_registrations)
        self._namespace["_apply"] = make_function(
            f"GeneratedBackwardFor_{op._opoverload._namespace}_{op._opoverload._opname}_{op._opoverload._overloadname}",
            op._opoverload,
            self._wrong_output,
            self._alias_error,
            op._backward_fn,
            op._setup_context_fn,
            any(a.kwarg_only for a in op._opoverload._schema.arguments),
        )

    def _admit_keys(self, tensor: Any) -> None:
        """Admit the dispatch keys of ``tensor``, after a miss, if they are an ordinary tensor's."""
        if type(tensor) not in PLAIN or tensor.device.type == "meta" or self._op.has_disabled_kernels:
            return
        kernel = self._op.kernel_for(tensor.device.type)
        if kernel is None or _torch.torch_function_mode_enabled():
            return
        include, exclude = _torch.default_dispatch_state()
        if (
            _torch.local_include_set().raw_repr() != include
            or _torch.local_exclude_set().raw_repr() != exclude
        ):
            return
        count = len(_torch.python_registrations)
        if self._namespace["_registered"] != count:
            if _torch.dispatch_table(self._op.qualname) != self._table:
                return  # another party's kernel: the dispatcher decides
            self._namespace["_registered"] = count
        key = _torch.dispatch_keys(tensor).raw_repr()
        if key == _torch.dispatch_keys(torch.empty(0, device=tensor.device)).raw_repr():
            self._namespace["_INCLUDE"], self._namespace["_EXCLUDE"] = include, exclude
            self._kernels[key] = kernel

    def _cache_check(self, kernel: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Make calls with similar tensors pass all tensor checks at once."""
        self._mismatches += 1
        if self._mismatches <= _REBUILD_INTERVAL or self._mismatches % _REBUILD_INTERVAL == 0:
            # One value for both, because other threads may read it while this one replaces it.
            self._namespace["_last"] = (_torch.tensors_like(*tensors), kernel)

    # --- what a kernel returned --------------------------------------------------------------------
    def _wrong_output(self, result: Any) -> Any:
        """Return the result in the form that the dispatcher returns, or raise."""
        return check_result(self._op.qualname, self._op._opoverload._schema, result)

    def _alias_error(self) -> None:
        raise OutputAliasError(
            f"{self._op._name}: The output of this custom operator (1) must not also be an input to this custom "
            "operator and (2) may not alias any inputs to this custom operator or other returns. The most common way "
            "to trigger this error is if we have y = custom_op(x) and y and x are the same Tensor. Please instead "
            "return a clone of the offending output tensor(s) (e.g. return x.clone()) or refactor the custom "
            "operator to not return y.",
            op=self._op.qualname,
        )
