"""The verdict as a terminal shows it."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.training.verify.verdict import Verdict

__all__ = ["print_verdict"]

# Variables that agree are not listed beyond this many.
MOST_ROWS = 24


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Prints the steps, the variables, and what follows from them."""
    console.print(_steps(verdict))
    console.print(_variables(verdict))
    found = verdict.comparison
    without = f" (without: {', '.join(verdict.allowed)})" if verdict.allowed else ""
    if verdict.is_equal:
        _say(
            console,
            f"EQUAL: {verdict.replicas} replicas compute what one device computes{without}. Largest difference over "
            f"{len(found.losses)} steps: {found.worst:.1e}, allowed {found.tolerance:.0e}.",
            "bold green",
        )
        return
    _say(console, _parting(verdict), "bold red")
    for cause in verdict.causes:
        _say(console, f"Likely cause: {cause.name}. {cause.what}")
        _say(console, f"What to do: {cause.remedy}")
    if not verdict.causes:
        _say(
            console,
            "The cause is none that lockstep recognises (a batch that is not split, a loss averaged over the slice, "
            "BatchNormalization, dropout, an op that is not deterministic). Look at what computes this variable.",
        )


def _say(console: Console, text: str, style: str | None = None) -> None:
    """Prints ``text`` as it is: names in it may look like markup."""
    console.print(text, style=style, highlight=False, markup=False)


def _parting(verdict: Verdict) -> str:
    parting = verdict.comparison.parting
    assert parting is not None
    where = f"variable {parting.variable} by {parting.difference:.1e}" if parting.variable else "no variable yet"
    gradient = "" if parting.gradient is None else f", gradient norm by {parting.gradient:.1e}"
    return (
        f"DIFFERENT: {verdict.replicas} replicas and one device part in step {parting.step}: {where} (the first, in the "
        f"model's order), loss by {parting.loss:.1e}{gradient}. Allowed: {verdict.comparison.tolerance:.0e}."
    )


def _steps(verdict: Verdict) -> Table:
    found, n = verdict.comparison, verdict.replicas
    table = Table(title=escape(f"{verdict.target} on 1 device and on {n} replicas"), title_justify="left")
    for heading in ("step", "loss on 1", f"on {n}", "apart"):
        table.add_column(heading, justify="right")
    for heading in ("gradient on 1", f"on {n}", "apart") if found.norms else ():
        table.add_column(heading, justify="right")
    for i, difference in enumerate(found.losses):
        row = [str(i + 1), f"{found.reference.losses[i]:.6g}", f"{found.other.losses[i]:.6g}", _cell(difference, verdict)]
        if found.norms:
            one, several = found.norms[i]
            row += [f"{one:.6g}", f"{several:.6g}", _cell(found.gradients[i], verdict)]
        table.add_row(*row)
    return table


def _variables(verdict: Verdict) -> Table:
    found = verdict.comparison
    table = Table(title="Weights, relative to how far they have moved", title_justify="left")
    table.add_column("variable")
    table.add_column("shape")
    table.add_column("parts in step", justify="right")
    table.add_column("apart by", justify="right")
    hidden = 0
    for name, each in found.weights.items():
        parts = next((i + 1 for i, d in enumerate(each) if not d <= found.tolerance), None)
        shape = "×".join(map(str, found.reference.weights[0][name].shape)) or "scalar"
        if name in found.undetermined:
            why = "follows the above" if name in found.reference.statistics else "no gradient"
            table.add_row(escape(name), shape, "-", why, style="dim")
        elif parts is None and len(found.weights) > MOST_ROWS:
            hidden += 1
        else:
            table.add_row(escape(name), shape, str(parts or "-"), _cell(max(each), verdict))
    if hidden:
        table.add_row(f"{hidden} more", "", "-", f"at most {found.tolerance:.0e}", style="dim")
    return table


def _cell(difference: float, verdict: Verdict) -> str:
    style = "green" if difference <= verdict.comparison.tolerance else "red"
    return f"[{style}]{difference:.1e}[/]"
