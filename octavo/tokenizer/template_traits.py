"""What a chat template expects of messages, read from its syntax tree.

Templates agree on little: some add content as a string, some loop over its parts; some want tool-call arguments as a
mapping, some as JSON text. Guessing wrong gives an exception or, worse, a prompt that looks right.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import jinja2
from jinja2 import nodes

from octavo.errors import ClientError
from octavo.tokenizer.jinja_environment import make_environment


@dataclass(frozen=True)
class TemplateTraits:
    """Answers about one template."""

    loops_over_content: bool  # content is a list of parts
    tests_string_content: bool  # tells string content from a list itself
    tests_null_content: bool  # treats null content on its own
    knows_developer: bool  # has words for the role "developer"
    knows_tools: bool  # writes the tools that are offered
    shows_calls: bool  # writes tool calls of earlier turns
    shows_any_role: bool  # writes messages of whatever role
    arguments_as_text: bool  # puts tool-call arguments into the text as they are


@lru_cache(maxsize=64)
def template_traits(source: str) -> TemplateTraits:
    """Read a template; ClientError when it is not valid Jinja."""
    try:
        tree = make_environment().parse(source)
        content, arguments = _Field(tree, "content"), _Field(tree, "arguments")
        return TemplateTraits(
            loops_over_content=content.is_looped_over(),
            tests_string_content=content.is_tested("string", "iterable", "mapping", "sequence"),
            tests_null_content=content.is_tested("none") or content.is_compared_with_none(),
            knows_developer=any(node.value == "developer" for node in tree.find_all(nodes.Const)),
            knows_tools=any(node.name == "tools" for node in tree.find_all(nodes.Name)),
            shows_calls=_names(tree, "tool_calls") or _shows_whole_messages(tree),
            shows_any_role=_Field(tree, "role").is_concatenated() or _shows_whole_messages(tree),
            arguments_as_text=arguments.is_concatenated()
            and not arguments.is_tested("string", "mapping")
            and not arguments.is_taken_apart(),
        )
    except jinja2.TemplateSyntaxError as error:
        raise ClientError(
            f"the chat template is not valid, line {error.lineno}: {error}", param="chat_template"
        ) from None
    except RecursionError:
        raise ClientError("the chat template is nested too deeply.", param="chat_template") from None


def _names(tree: nodes.Template, field: str) -> bool:
    """Whether a field is mentioned at all."""
    attributes = any(node.attr == field for node in tree.find_all(nodes.Getattr))
    return attributes or any(node.value == field for node in tree.find_all(nodes.Const))


def _shows_whole_messages(tree: nodes.Template) -> bool:
    """Whether messages are written as JSON, with all that they have."""
    loops = (loop for loop in tree.find_all(nodes.For) if isinstance(loop.iter, nodes.Name))
    names = {loop.target.name for loop in loops if isinstance(loop.target, nodes.Name)} | {"messages"}
    filters = (node for node in tree.find_all(nodes.Filter) if node.name == "tojson")
    return any(isinstance(node.node, nodes.Name) and node.node.name in names for node in filters)


class _Field:
    """One field of a message (or tool call), and the variables that hold it."""

    def __init__(self, tree: nodes.Template, name: str):
        self._tree = tree
        self._name = name
        self._variables: set[str] = set()
        while len(new := self._variables | set(self._find_variables())) > len(self._variables):
            self._variables = new

    def _find_variables(self) -> Iterator[str]:
        """Variables assigned from the field, and macro parameters it is passed to."""
        for assign in self._tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and self._is_field(assign.node):
                yield assign.target.name
        macros = {macro.name: macro for macro in self._tree.find_all(nodes.Macro)}
        for call in self._tree.find_all(nodes.Call):
            if not isinstance(call.node, nodes.Name) or call.node.name not in macros:
                continue
            parameters = [parameter.name for parameter in macros[call.node.name].args]
            for parameter, value in zip(parameters, call.args, strict=False):
                if self._is_field(value):
                    yield parameter
            for keyword in call.kwargs:
                if self._is_field(keyword.value):
                    yield keyword.key

    def _is_field(self, node: nodes.Node | None) -> bool:
        """Whether an expression is the field: itself, a variable that holds it, or either behind filters and slices."""
        match node:
            case nodes.Getattr(attr=self._name):
                return True
            case nodes.Getitem(arg=nodes.Const(value=self._name)):
                return True
            case nodes.Name():
                return node.name in self._variables
            case nodes.Filter() | nodes.Getitem(arg=nodes.Slice()):
                return self._is_field(node.node)
            case nodes.CondExpr():
                return self._is_field(node.expr1) or self._is_field(node.expr2)
        return False

    def is_looped_over(self) -> bool:
        return any(self._is_field(loop.iter) for loop in self._tree.find_all(nodes.For))

    def is_tested(self, *tests: str) -> bool:
        return any(test.name in tests and self._is_field(test.node) for test in self._tree.find_all(nodes.Test))

    def is_compared_with_none(self) -> bool:
        for compare in self._tree.find_all(nodes.Compare):
            others = [operand.expr for operand in compare.ops]
            if self._is_field(compare.expr) and any(isinstance(o, nodes.Const) and o.value is None for o in others):
                return True
        return False

    def _is_raw(self, node: nodes.Node) -> bool:
        """The field as it is, not turned into JSON by a filter."""
        return self._is_field(node) and not isinstance(node, nodes.Filter)

    def is_concatenated(self) -> bool:
        """Whether the field is added to a string, or written out, as it is."""
        for add in self._tree.find_all(nodes.Add):
            if self._is_raw(add.left) or self._is_raw(add.right):
                return True
        written = [child for node in self._tree.find_all(nodes.Concat) for child in node.nodes]
        written += [child for node in self._tree.find_all(nodes.Output) for child in node.nodes]
        return any(self._is_raw(child) for child in written)

    def is_taken_apart(self) -> bool:
        """Whether something asks for the field's keys or items, or turns it into JSON."""
        filters = (node for node in self._tree.find_all(nodes.Filter) if node.name in ("tojson", "items", "dictsort"))
        if any(node.node is not None and self._is_field(node.node) for node in filters):
            return True
        return any(
            attribute.attr in ("items", "keys", "values") and self._is_field(attribute.node)
            for attribute in self._tree.find_all(nodes.Getattr)
        )
