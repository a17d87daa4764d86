"""What an expression of a function is, as far as annotations and constructors say it."""

import ast
import functools
from dataclasses import dataclass, field

from tests.compat.source import Class, Definition, Function, Module, Sources, Value

PASSED_ON = {"Optional", "ClassVar", "Final", "Annotated", "Required", "type", "Type"}
MAPPINGS = {"dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict"}
SEQUENCES = {
    *("list", "List", "Sequence", "Iterable", "Iterator", "Generator", "Collection"),
    *("set", "frozenset", "deque", "tuple", "Tuple"),
}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SAME_ITEMS = {"list", "tuple", "set", "sorted", "reversed", "iter"}


@dataclass(frozen=True)
class Instance:
    """An object of a class."""

    of: Class


@dataclass(frozen=True)
class Super:
    """What ``super()`` is in a class."""

    of: Class


@dataclass(frozen=True)
class Many:
    """A container: what iterating over it gives, and what an index gives."""

    keys: "Type | None"
    items: "tuple[Type | None, ...]"
    """Several for a tuple of known length."""

    @property
    def item(self) -> "Type | None":
        return self.items[0] if self.items else None


Type = Instance | Super | Many | Definition
"""A `Definition` stands for itself: the class, not an object of it."""


@dataclass
class Scope:
    """Names of a function, and of the functions around it."""

    module: Module
    cls: Class | None = None
    outer: "Scope | None" = None
    names: dict[str, "Type | None"] = field(default_factory=dict)

    def find(self, name: str) -> "Type | None":
        if name in self.names:
            return self.names[name]
        return self.outer.find(name) if self.outer else None

    def knows(self, name: str) -> bool:
        return name in self.names or bool(self.outer and self.outer.knows(name))


@functools.cache
def own_nodes(body: ast.AST) -> tuple[ast.AST, ...]:
    """Nodes of a module, class or function in their order, without those of what it defines."""
    nodes, left = [], [body]
    while left:
        node = left.pop()
        nodes.append(node)
        if node is body or not isinstance(node, DEFINITIONS):
            left += reversed(list(ast.iter_child_nodes(node)))
    return tuple(nodes[1:])


class Inference:
    """Types of expressions over some packages."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._values: dict[ast.expr, Type | None] = {}
        self._scopes: dict[Function, Scope] = {}

    # ----------------------------------------------------------------- annotations

    def annotated(self, module: Module, expression: ast.expr | None) -> Type | None:
        """What an annotation says."""
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            try:
                expression = ast.parse(expression.value, mode="eval").body
            except SyntaxError:
                return None
        if isinstance(expression, ast.BinOp):
            return self.annotated(module, expression.left) or self.annotated(
                module, expression.right
            )
        if isinstance(expression, ast.Subscript):
            return self._generic(module, expression)
        if isinstance(expression, ast.Name | ast.Attribute):
            found = self.sources.named(module, expression)
            if isinstance(found, Class):
                return Instance(found)
            if isinstance(found, Value) and found.value is not None:  # an alias
                return self.annotated(found.module, found.value)
        return None

    def _generic(self, module: Module, expression: ast.Subscript) -> Type | None:
        name = ast.unparse(expression.value).split(".")[-1]
        inside = expression.slice
        items = inside.elts if isinstance(inside, ast.Tuple) else [inside]
        items = [each for each in items if ast.unparse(each) != "..."]
        if name in PASSED_ON:
            of = self.annotated(module, items[0])
            return of.of if name in ("type", "Type") and isinstance(of, Instance) else of
        types = [self.annotated(module, each) for each in items]
        if name in MAPPINGS:
            return Many(types[0], tuple(types[1:2]))
        if name in SEQUENCES:
            return Many(types[0], tuple(types))
        return self.annotated(module, expression.value)

    # ----------------------------------------------------------------- members

    def member(self, of: Type | None, name: str) -> Definition | None:
        """What an attribute of something is."""
        if isinstance(of, Instance):
            return self.sources.member(of.of, name)
        if isinstance(of, Super):
            behind = self.sources.mro(of.of)[1:]
            return next((each.members[name] for each in behind if name in each.members), None)
        if isinstance(of, Module | Class):
            return self.sources.member(of, name)
        return None

    def value(self, definition: Definition | None, of: Type | None = None) -> Type | None:
        """The type of what a definition holds, seen as a member of an object."""
        if isinstance(definition, Function) and definition.is_property:
            return self.returned(definition, of)
        if not isinstance(definition, Value):
            return definition
        if definition.annotation is not None:
            return self.annotated(definition.module, definition.annotation)
        if definition.value is None:
            return None
        key = definition.value
        if key not in self._values:
            self._values[key] = None  # while it is looked for
            scope = Scope(definition.module)
            if definition.method is not None:
                if definition.method not in self._scopes:
                    self._scopes[definition.method] = self.scope(definition.method)
                scope = self._scopes[definition.method]
            self._values[key] = self.infer(definition.value, scope)
        return self._values[key]

    def returned(self, function: Function, of: Type | None) -> Type | None:
        """What a call of a function gives."""
        returns = function.node.returns
        if returns is not None and ast.unparse(returns).strip("'\"") == "Self":
            if isinstance(of, Class):
                return Instance(of)
            return of if isinstance(of, Instance) else None
        return self.annotated(function.module, returns)

    # ----------------------------------------------------------------- functions

    def scope(self, function: Function, outer: Scope | None = None) -> Scope:
        """Names of a function: its parameters, and what it assigns, each by its first type."""
        cls = function.owner or (outer.cls if outer else None)
        scope = Scope(function.module, cls, outer)
        given = function.node.args
        parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        for each in parameters:
            scope.names[each.arg] = self.annotated(function.module, each.annotation)
        if function.owner is not None and parameters and "staticmethod" not in function.decorators:
            is_class = "classmethod" in function.decorators
            first: Type = function.owner if is_class else Instance(function.owner)
            scope.names[parameters[0].arg] = first
        for variable in (given.vararg, given.kwarg):
            if variable is not None:
                scope.names[variable.arg] = None
        self.bind_all(function.node, scope)
        return scope

    def bind_all(self, body: ast.AST, scope: Scope) -> None:
        """Bind what statements and comprehensions assign."""
        for node in own_nodes(body):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self.bind(target, self.infer(node.value, scope), scope)
            elif isinstance(node, ast.AnnAssign):
                self.bind(node.target, self.annotated(scope.module, node.annotation), scope)
            elif isinstance(node, ast.NamedExpr):
                self.bind(node.target, self.infer(node.value, scope), scope)
            elif isinstance(node, ast.For | ast.AsyncFor):
                self.bind(node.target, self.iterated(self.infer(node.iter, scope)), scope)
            elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
                self._bind_generators(node, scope)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    name = alias.asname or alias.name.split(".")[0]
                    scope.names[name] = self.sources.imported(scope.module, node, name)

    def _bind_generators(self, node: ast.expr, scope: Scope) -> None:
        assert isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp)
        for each in node.generators:
            self.bind(each.target, self.iterated(self.infer(each.iter, scope)), scope)

    def bind(self, target: ast.expr, kind: Type | None, scope: Scope) -> None:
        """Assign to a name, or to several."""
        if isinstance(target, ast.Name):
            if scope.names.get(target.id) is None:
                scope.names[target.id] = kind
        elif isinstance(target, ast.Tuple | ast.List):
            items = kind.items if isinstance(kind, Many) else ()
            if len(items) != len(target.elts):
                items = (self.iterated(kind),) * len(target.elts)
            for each, item in zip(target.elts, items):
                self.bind(each, item, scope)

    def iterated(self, kind: Type | None) -> Type | None:
        """What a loop over something gives."""
        return kind.keys if isinstance(kind, Many) else None

    # ----------------------------------------------------------------- expressions

    def infer(self, node: ast.expr, scope: Scope) -> Type | None:
        """What an expression is; None where nothing says so."""
        if isinstance(node, ast.Name):
            if scope.knows(node.id):
                return scope.find(node.id)
            return self.value(self.sources.resolve(scope.module, node.id))
        if isinstance(node, ast.Attribute):
            of = self.infer(node.value, scope)
            return self.value(self.member(of, node.attr), of)
        if isinstance(node, ast.Call):
            return self._called(node, scope)
        if isinstance(node, ast.Subscript):
            return self._indexed(node, scope)
        if isinstance(node, ast.IfExp):
            return self.infer(node.body, scope) or self.infer(node.orelse, scope)
        if isinstance(node, ast.BoolOp):
            return next(filter(None, (self.infer(each, scope) for each in node.values)), None)
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Starred):
            return self.infer(node.value, scope)
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            items = tuple(self.infer(each, scope) for each in node.elts)
            return Many(items[0] if items else None, items)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            self._bind_generators(node, scope)
            item = self.infer(node.elt, scope)
            return Many(item, (item,))
        if isinstance(node, ast.DictComp):
            self._bind_generators(node, scope)
            return Many(self.infer(node.key, scope), (self.infer(node.value, scope),))
        return None

    def _indexed(self, node: ast.Subscript, scope: Scope) -> Type | None:
        of = self.infer(node.value, scope)
        if not isinstance(of, Many):
            return None
        if isinstance(node.slice, ast.Slice):
            return of
        index = node.slice.value if isinstance(node.slice, ast.Constant) else 0
        if isinstance(index, int) and index < len(of.items):
            return of.items[index]
        return of.item

    def _called(self, node: ast.Call, scope: Scope) -> Type | None:
        function = node.func
        arguments = [self.infer(each, scope) for each in node.args]
        if isinstance(function, ast.Name):
            if function.id == "super" and scope.cls is not None:
                return Super(scope.cls)
            if function.id == "cast":
                return self.annotated(scope.module, node.args[0])
            if function.id == "type" and arguments:
                return arguments[0].of if isinstance(arguments[0], Instance) else None
            if function.id in SAME_ITEMS:
                return arguments[0] if arguments else None
            if function.id in ("next", "min", "max") and arguments:
                return self.iterated(arguments[0])
            if function.id == "enumerate":
                pair = Many(None, (None, self.iterated(arguments[0])))
                return Many(pair, (pair,))
            if function.id == "zip":
                pair = Many(None, tuple(map(self.iterated, arguments)))
                return Many(pair, (pair,))
            if function.id == "getattr" and isinstance(node.args[1], ast.Constant):
                return self.value(self.member(arguments[0], str(node.args[1].value)), arguments[0])
        if (module := self.imported_by_name(node)) is not None:
            return module
        if isinstance(function, ast.Attribute):
            of = self.infer(function.value, scope)
            if isinstance(of, Many):
                return self._of_container(of, function.attr)
            return self._result(self.member(of, function.attr), of)
        return self._result(self.infer(function, scope), None)

    def imported_by_name(self, node: ast.Call) -> Module | None:
        """The module that a call names: ``sys.modules.get("a.b")``, ``import_module("a.b")``."""
        if ast.unparse(node.func).endswith(("modules.get", "import_module")) and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                return self.sources.module(name.value)
        return None

    def _of_container(self, of: Many, method: str) -> Type | None:
        if method == "values":
            return Many(of.item, (of.item,))
        if method == "items":
            pair = Many(None, (of.keys, of.item))
            return Many(pair, (pair,))
        if method in ("get", "pop", "setdefault", "popleft"):
            return of.item
        return of if method in ("copy", "keys") else None

    def _result(self, called: Type | None, of: Type | None) -> Type | None:
        if isinstance(called, Class):
            return Instance(called)
        if isinstance(called, Function):
            if called.node.name == "__init__":
                return None
            return self.returned(called, of)
        return None
