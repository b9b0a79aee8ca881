"""The public names have types, for those that a lazy module hides as well.

pyright reads tests/user_types.py in `make lint`; here it runs, and the names that type checkers see
are compared with those that there are.
"""

import ast
from pathlib import Path

import user_types

import weft
import weft.ops

SOURCE = Path(weft.__file__).parent


def checked_names(path: Path) -> set[str]:
    """The names that a module imports for type checkers alone."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for one in node.body:
                assert isinstance(one, ast.ImportFrom)
                names |= {alias.asname or alias.name for alias in one.names}
    return names


def test_a_users_file_runs():
    assert user_types.on_emulated_ranks() == [1, 0]


def test_the_package_is_typed():
    assert (SOURCE / "py.typed").exists()


def test_type_checkers_see_every_public_name():
    public = {name for name in dir(weft) if not name.startswith("_")}
    assert checked_names(SOURCE / "__init__.py") == set(weft.__all__)
    assert set(weft.__all__) <= public
    for name in weft.__all__:
        getattr(weft, name)


def test_type_checkers_see_every_operator():
    assert checked_names(SOURCE / "ops" / "__init__.py") == set(weft.ops.names())
