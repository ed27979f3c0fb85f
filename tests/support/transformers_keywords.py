"""Reads from transformers' sources the keywords that its models pass to the attention interface.

A model's keywords reach the interface in two ways: written in the call ``attention_interface(..., indices=x)``, or
passed down in ``**kwargs`` from the modules above. Both are followed, within one file, by the names of classes and
attributes.
"""

import ast
import functools
import gc
import pathlib
import re
from collections import defaultdict

import transformers

ROOT = pathlib.Path(transformers.__file__).parent


class _File:
    """The classes of one modeling file, their forward functions, and the modules that they hold."""

    def __init__(self, source: str) -> None:
        # Only these parts are parsed: parsing is most of the time.
        parts = re.findall(r"^(?:class|def eager_attention_forward)\b.*?(?=^\S(?<!\)))", source + "\nend", re.M | re.S)
        parts = [part for part in parts if "attention" in part.lower() or "**kwargs" in part]
        nodes = [ast.parse(part).body[0] for part in parts]
        self.classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
        self.eager = next((node.args for node in nodes if isinstance(node, ast.FunctionDef)), None)
        self.forwards = {name: f for name in self.classes if (f := self._forward(name)) is not None}
        self.held = {name: self._held(name) for name in self.forwards}

    def _with_bases(self, name: str) -> list[ast.ClassDef]:
        if name not in self.classes:
            return []
        bases = [base.id for base in self.classes[name].bases if isinstance(base, ast.Name)]
        return [self.classes[name], *(c for base in bases for c in self._with_bases(base))]

    def _forward(self, name: str) -> ast.FunctionDef | None:
        functions = (f for c in self._with_bases(name) for f in c.body if isinstance(f, ast.FunctionDef))
        return next((f for f in functions if f.name == "forward"), None)

    def _held(self, name: str) -> dict[str, set[str]]:
        """attribute -> classes that the class assigns to it, also in lists."""
        held = defaultdict(set)
        for function in (f for c in self._with_bases(name) for f in c.body if isinstance(f, ast.FunctionDef)):
            for node in ast.walk(function) if function.name in ("__init__", "post_init") else ():
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                    names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
                    held[node.targets[0].attr] |= names & self.forwards.keys()
        return held

    def calls(self, name: str):
        """(callee, keywords, whether **kwargs is passed on) for each call of a module in `name`.forward.

        The callee is a class of the file, or "" for the attention interface.
        """
        forward, held = self.forwards[name], self.held[name]
        nodes = list(ast.walk(forward))
        items = {}  # for item in self.attribute: item(...)
        for loop in (node for node in nodes if isinstance(node, ast.For)):
            found = set().union(*(held[a.attr] for a in ast.walk(loop.iter) if isinstance(a, ast.Attribute)))
            items |= {n.id: found for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
        own = forward.args.kwarg.arg if forward.args.kwarg else None
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            function = call.func
            if isinstance(function, ast.Name):
                callees = {""} if function.id == "attention_interface" else items.get(function.id, ())
            else:
                callees = held.get(function.attr, ()) if isinstance(function, ast.Attribute) else ()
            if not callees:
                continue
            keywords = {k.arg for k in call.keywords if k.arg}
            passed_on = any(
                isinstance(k.value, ast.Name) and k.arg is None and k.value.id == own for k in call.keywords
            )
            for callee in callees:
                yield callee, keywords, passed_on

    def keywords_at_interface(self) -> set[str]:
        """Keywords of the interface's calls, and the keywords that arrive there in **kwargs."""
        calls = [(name, *call) for name in self.forwards for call in self.calls(name)]
        received = defaultdict(set)  # class, or "" for the interface -> keywords in its **kwargs
        sizes = None
        while sizes != (sizes := sum(map(len, received.values()))):
            for caller, callee, keywords, passed_on in calls:
                arguments = self.forwards[callee].args if callee else None
                if arguments is None or arguments.kwarg:
                    named = {a.arg for a in (*arguments.args, *arguments.kwonlyargs)} if arguments else set()
                    received[callee] |= (keywords | (received[caller] if passed_on else set())) - named
        return received[""]

    def keywords_of_eager(self) -> set[str]:
        """The parameters of the file's eager attention."""
        return {a.arg for a in (*self.eager.args, *self.eager.kwonlyargs)} if self.eager else set()


@functools.cache
def keywords_of_models() -> tuple[dict[str, set[str]], set[str]]:
    """keyword -> models that pass it to the attention interface; and the keywords that eager functions read."""
    passed, read = defaultdict(set), set()
    gc.disable()  # parsing makes many objects, and the collector would visit them repeatedly
    try:
        for path in sorted(ROOT.glob("models/*/modeling_*.py")):
            source = path.read_text(encoding="utf-8")
            if "attention_interface(" in source:
                file = _File(source)
                read |= file.keywords_of_eager()
                for keyword in file.keywords_at_interface():
                    passed[keyword].add(path.parent.name)
    finally:
        gc.enable()
    return dict(passed), read
