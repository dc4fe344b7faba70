"""The command `polyamp monitor`: draws the records that a training's monitor wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from polyamp.cli.console import exit_with_error, make_console

File = Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines that a monitor's JsonLinesWriter wrote.")]
Last = Annotated[int, typer.Option("--last", min=1, help="Number of records and of modules to show.")]
Save = Annotated[
    list[Path] | None,
    typer.Option("--save", metavar="PATH", help="Draw all records to an .html or .png file. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the records as one JSON object.")]


def monitor(file: File, last: Last = 20, save: Save = None, json: Json = False) -> None:
    """Show what a monitor recorded: loss, gradient norm, loss scale, skips, and what each module loses in 16 bits.

    The file may be that of a training that still runs, or was killed.

    Exit status: 0; 1 the loss scale is sinking; 2 a wrong argument or file.
    """
    import msgspec

    from polyamp.errors import PolyampError
    from polyamp.monitor.monitor_page import monitor_page
    from polyamp.monitor.records import encode_line, read_monitor_file
    from polyamp.monitor.text_table import module_table, output_table, product_table, record_table
    from polyamp.report_page.page_files import save_page

    console = make_console(stderr=json)
    try:
        found = read_monitor_file(file)
        paths = [save_page(monitor_page(found.header, found.records), path) for path in save or ()]
    except PolyampError as error:
        exit_with_error(error)
    if json:
        lines = [msgspec.json.decode(encode_line(record)) for record in found.records]
        header = msgspec.json.decode(encode_line(found.header))
        typer.echo(msgspec.json.encode({"header": header, "records": lines, "torn": found.torn}).decode())
    elif not found.records:
        console.print("No records yet.")
    else:
        about = f"{found.header.backend}, {found.header.policy}, one record every {found.header.every} steps"
        console.print(escape(about), soft_wrap=True)
        console.print(record_table(found.records, most=last))
        shown = next((record for record in reversed(found.records) if record.modules), None)
        if shown is not None:
            console.print(f"Gradients in call {shown.call:,}, judged times the loss scale in {found.header.compute}")
            console.print(module_table(shown, most=last))
            for table in (output_table(shown, most=last), product_table(shown, most=last)):
                if table is not None:
                    console.print(table)
        console.print(f"{found.records[-1].word}: {found.records[-1].reason}")
    if found.torn:
        console.print("The last line is not finished: the writer was killed, or writes just now.")
    for path in paths:
        console.print(f"wrote {path}", soft_wrap=True)
    raise typer.Exit(1 if found.records and found.records[-1].word == "sinking" else 0)
