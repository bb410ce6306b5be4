"""Print what each process needs."""

from meshtrain import console
from meshtrain.pictures.tables import Table
from meshtrain.planning.machine import Machine
from meshtrain.planning.needs import Needs
from meshtrain.planning.remarks import (
    compilation_remark,
    documents_remark,
    estimates_remark,
    host_remark,
    time_remark,
)
from meshtrain.planning.tables import axes_table, memory_table, messages_table, work_table
from meshtrain.training.resolve import ResolvedRun


def show_tables(needs: Needs, resolved: ResolvedRun, machine: Machine) -> None:
    """Print the tables and the remarks about them."""
    _show(memory_table(needs))
    _say(host_remark(needs))
    _show(messages_table(needs))
    _show(work_table(needs))
    if needs.time is not None:
        _show(axes_table(needs.time))
    _say(time_remark(needs, machine))
    _say(estimates_remark(machine))
    _say(documents_remark(resolved))
    _say(compilation_remark(resolved))


def _show(table: Table) -> None:
    if table.rows:
        console.table(table.title, table.columns, table.rows)


def _say(remark: str) -> None:
    if remark:
        console.line(remark)
