"""Tables: inference of a schema from training rows, and encoding of rows as features.

Without a schema file, the type of each column is inferred by the rule of `infer_column`, and
columns of an unclear type are an error that names the command to write a schema.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from fedhet.base.errors import DataError, one_line
from fedhet.data.columns import describe_unclear, infer_column, may_identify
from fedhet.data.dataset import Split
from fedhet.data.rows import Table, missing_column_error
from fedhet.data.schemas import SCHEMA, TableSchema
from fedhet.data.spec import DataSpec, check_max_bytes
from fedhet.data.targets import infer_targets, read_targets, schema_command, target_names

if TYPE_CHECKING:
    import torch

LOG = logging.getLogger("fedhet")
_FLOAT = 4


def infer_schema(
    table: Table,
    spec: DataSpec,
    report: Callable[[str], object] = LOG.info,
    declared: TableSchema | None = None,
    *,
    draft: bool = False,
) -> TableSchema:
    """Infer the schema of a table from its training rows.

    The features are the columns of the declared schema or, without one, all columns except the
    target, `data.by`, and `data.exclude`.

    Args:
        table: Training rows.
        spec: Data settings.
        report: Function that is called with one line for each column.
        declared: Schema with the type and the notation of each column. Its unknown means, standard
            deviations, and categories are computed.
        draft: Whether to return columns of an unclear type and ignored columns, too.

    Raises:
        DataError: If the target or another column is unsuitable. If columns have an unclear type,
            the error's notes describe each of them.
    """
    columns = declare(table, spec, declared).columns
    targets = infer_targets(table, spec, report, declared, draft=draft, targets_only=False)
    if not draft and (unclear := [column.name for column in columns if column.type == "?"]):
        names = one_line(", ".join(map(repr, unclear)))
        count = "a column has" if len(unclear) == 1 else f"{len(unclear)} columns have"
        error = DataError(
            f"{table.path}: {count} no clear type: {names}. Run `{schema_command(table, spec)}`, "
            f"and replace each '?' in {SCHEMA}, or add the columns to data.exclude."
        )
        for comment in describe_unclear(table, unclear).values():
            error.add_note(comment)
        raise error
    fitted = []
    for column in columns:
        if column.type in ("ignore", "?"):
            report(f"{column.name}: {'ignored' if column.type == 'ignore' else 'no clear type'}")
            fitted += [column] * draft
            continue
        fitted.append(column.fit(table))
        values = table.column(column.name)
        absent = column.absent(values.texts)
        evidence = ""
        if missing := int(values.counts()[absent].sum()):
            marks = ", ".join(repr(values.texts[k]) for k in np.flatnonzero(absent)[:5])
            evidence = f" ({missing} of {len(table)} are missing: {marks})"
        if column.type == "number" and len(values.texts) - absent.sum() == 1:
            evidence += " (all values are equal)"
        report(f"{column.name}: {fitted[-1].summary}{evidence}")
        if may_identify(column, values):
            LOG.warning(
                "%s: all %d values are different integers of equal length. If they identify a "
                "person or a sample, exclude the column with data.exclude.",
                one_line(f"{table.path}: column {column.name!r}"), len(table),
            )  # fmt: skip
    if not fitted:
        raise DataError(
            f"{table.path}: expected at least one feature column, got only {spec.target!r}"
        )
    return targets.model_copy(update={"columns": tuple(fitted)})


def declare(table: Table, spec: DataSpec, declared: TableSchema | None = None) -> TableSchema:
    """Return the types and notations of a table's feature columns, declared or inferred.

    A column of an unclear type has the type "?". Raises DataError if a column is not found.
    """
    if not spec.target:
        raise DataError(
            f"{table.path}: data.target must name the label column, one of "
            f"{', '.join(table.columns)}"
        )
    targets = target_names(table.columns, spec.target)
    for name in targets:
        table.column(name, lists=True)
    excluded = {*targets, spec.by.strip(), *spec.exclude}
    for name in spec.exclude:
        if name not in table.columns:
            raise missing_column_error(table.path, name, table.columns, " (data.exclude)")
    if declared is None or not declared.columns:
        columns = tuple(infer_column(name, table) for name in table.columns if name not in excluded)
        return TableSchema.model_construct(target=spec.target, columns=columns)
    columns = tuple(column for column in declared.columns if column.name not in excluded)
    for column in columns:
        table.column(column.name)
    used = excluded | {column.name for column in columns}
    if unused := [name for name in table.columns if name not in used]:
        LOG.warning(
            "%s: columns that are not in %s are not used: %s. Add them to the schema or to "
            "data.exclude, or remove the schema to start over.",
            table.path, SCHEMA, one_line(", ".join(unused)),
        )  # fmt: skip
    return declared.model_copy(update={"columns": columns})


def encode(schema: TableSchema, table: Table, *, strict: bool = False) -> torch.Tensor:
    """Encode the rows of a table as features.

    Unknown values are logged.

    Args:
        schema: Schema of the table.
        table: Rows of the table.
        strict: Whether to raise an error if the fraction of unknown values exceeds
            `schema.max_unknown`.

    Returns:
        Features of shape [N, F], float32.

    Raises:
        DataError: If a value is invalid, or if the features exceed `data.max-bytes`.
    """
    import torch

    check_max_bytes(_FLOAT * len(table) * sum(schema.widths), table.spec, table.path)
    encoded = np.empty((len(table), sum(schema.widths)), np.float32)
    start = 0
    for column in schema.columns:
        features, unknown = column.encode(table)
        encoded[:, start : start + column.width] = features
        start += column.width
        if count := sum(unknown.values()):
            where = f"{table.path}: column {column.name!r}"
            few = ", ".join(repr(text) for text in sorted(unknown)[:3])
            fault = f"{count} of {len(table)} values, such as {few}, are not in the schema"
            if strict and count > schema.max_unknown * len(table):
                raise DataError(
                    f"{where}: {fault[:200]}, expected a fraction of at most "
                    f"{schema.max_unknown:g}. Use the spelling of the schema, or raise its "
                    "max_unknown."
                )
            LOG.warning("%s", one_line(f"{where}: {fault}"))
    return torch.from_numpy(encoded)


def labeled_split(schema: TableSchema, table: Table) -> Split:
    """Encode the features and the targets of a table's rows.

    Raises DataError for a row without a valid target.
    """
    targets = read_targets(schema, table)
    return Split(encode(schema, table, strict=True), targets)
