"""Sizes that a config may leave to the data: null means "what the data has", a number must be large enough."""

from __future__ import annotations

from recipes.data.records import DataInfo
from recipes.schema.model import DHENConfig


def at_least_as_data(key: str, from_config: int | None, from_data: int | None) -> int:
    """The size to build with.

    key: the config key, for messages. Raises ValueError if neither side knows, or the config's number is below the
    data's (ids would fall outside the model).
    """
    if from_config is None:
        if from_data is None:
            raise ValueError(f"{key} is null and the data does not say it; set {key} to a number")
        return from_data
    if from_data is not None and from_config < from_data:
        raise ValueError(f"{key} is {from_config}, but the data needs {from_data}; set it to {from_data} or null")
    return from_config


def exactly_as_data(key: str, from_config: int | None, from_data: int | None) -> int:
    """Like ``at_least_as_data`` for sizes that must agree (columns of an input)."""
    if from_config is None:
        if from_data is None:
            raise ValueError(f"{key} is null and the data does not say it; set {key} to a number")
        return from_data
    if from_data is not None and from_config != from_data:
        raise ValueError(f"{key} is {from_config}, but the data has {from_data}; set it to {from_data} or null")
    return from_config


def table_rows(config: DHENConfig, info: DataInfo) -> tuple[int, ...]:
    """Rows of each embedding table. Raises ValueError if config and data contradict each other or themselves."""
    equal_tables = config.num_tables is not None or config.rows_per_table is not None
    if config.table_rows is not None and equal_tables:
        raise ValueError("model.table_rows and model.num_tables/rows_per_table say the same thing twice; keep one")
    if equal_tables:
        if config.num_tables is None or config.rows_per_table is None:
            raise ValueError("model.num_tables and model.rows_per_table go together; set both or neither")
        from_config: tuple[int, ...] | None = (config.rows_per_table,) * config.num_tables
    else:
        from_config = None if config.table_rows is None else tuple(config.table_rows)
    if from_config is None:
        if info.table_rows is None:
            raise ValueError("model.table_rows is null and the data has no categorical features; set model.table_rows")
        return info.table_rows
    if info.table_rows is not None:
        if len(from_config) != len(info.table_rows):
            raise ValueError(
                f"the model has {len(from_config)} embedding tables, the data {len(info.table_rows)} categorical "
                "features; set model.table_rows to null to take the data's"
            )
        for table, (rows, needed) in enumerate(zip(from_config, info.table_rows, strict=True)):
            if rows < needed:
                raise ValueError(
                    f"embedding table {table} has {rows} rows, but the data's feature {table} has {needed} values"
                )
    return from_config
