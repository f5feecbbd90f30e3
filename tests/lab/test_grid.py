"""A grid in each of its forms, against the form written by hand."""

from pointsman_lab._grid import Grid, escape_latex

GRID = Grid(["router", "k=1", "seeds"], [["a|b_1", "1.5 ± 0.1", "2"], ["c", "2.0", "-"]], {(0, 1)}, "50 % of it")


def test_text() -> None:
    assert GRID.text().splitlines() == [
        "router        k=1  seeds",
        "------------------------",
        "a|b_1   1.5 ± 0.1      2",
        "c             2.0      -",
    ]
    assert GRID.text(rule=False).splitlines()[1] == "a|b_1   1.5 ± 0.1      2"
    wide = Grid(["router", "k=1"], [["路由", "1"], ["smoe", "2"]]).text().splitlines()
    assert wide[2:] == ["路由      1", "smoe      2"]  # two columns of a terminal a character
    assert Grid(["router", "k=1"], []).text() == "router  k=1\n-----------"


def test_other_names_for_rows() -> None:
    grid = Grid(["router", "x"], [["smoe", "1"], ["smoe k=2", "1"], ["k=2", "1"], ["a k=1", "1"]])
    named = grid.named({"smoe": "Plain", "a k=1": "b"})
    assert [row[0] for row in named.rows] == ["Plain", "Plain k=2", "k=2", "b"]


def test_markdown() -> None:
    assert GRID.markdown().splitlines() == [
        "| router | k=1 | seeds |",
        "| --- | ---: | ---: |",
        "| `a\\|b_1` | **1.5 ± 0.1** | 2 |",
        "| `c` | 2.0 | - |",
    ]
    plain = Grid(["", "", "x"], [["a", "b", "1"]], code=False, labels=2)
    assert plain.markdown().splitlines()[1:] == ["| --- | --- | ---: |", "| a | b | 1 |"]


def test_csv() -> None:
    assert Grid(["router", "mean"], [["a,b", 0.1], ["c", None]]).csv() == 'router,mean\n"a,b",0.1\nc,-\n'


def test_latex() -> None:
    lines = GRID.latex("mine").splitlines()
    assert r"  \caption{50 \% of it}" in lines
    assert r"  \begin{tabular}{lrr}" in lines
    assert r"    router & k=1 & seeds \\" in lines
    assert r"    \texttt{a\textbar{}b\_1} & \textbf{1.5 $\pm$ 0.1} & 2 \\" in lines
    assert r"  \label{tab:mine-50-of-it}" in GRID.latex(within="mine").splitlines()
    assert escape_latex(r"50%_#$~^\{}") == r"50\%\_\#\$\textasciitilde{}\textasciicircum{}\textbackslash{}\{\}"


def test_columns_without_figures_are_left_out() -> None:
    grid = Grid(["layer", "a", "b"], [["-", "-", "1"], ["x", "-", "-"]], {(0, 2)}).without_empty_columns()
    assert (grid.header, grid.rows, grid.best) == (["layer", "b"], [["-", "1"], ["x", "-"]], {(0, 1)})


def test_no_form_of_a_table_has_what_a_terminal_obeys() -> None:
    grid = Grid(["=1\x9b", "a\nb"], [["x\x1b[2J\n\ny", "\u202ez"]])
    forms = [grid.text(), grid.csv(), grid.markdown(), grid.latex()]
    assert not [form for form in forms if set("\x1b\x9b\u202e") & set(form)]
    assert grid.csv().startswith("'=1")
    assert "| --- |" in grid.markdown().splitlines()[1]
    assert "\n\n" not in grid.latex()
