"""`intentkv report`: a trace as one HTML file to read."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from intentkv.report.read import ReportError, read_trace
from intentkv.report.render import render
from intentkv.report.text import Numbers, TokenizerText
from intentkv.report.view import build_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="file or folder that --intentkv-trace wrote")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="default: report.html")
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="model that was served, for its tokenizer; without it, token ids are shown"
    )
    parser.add_argument("--session", metavar="NAME", help="only the sessions of this name")


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print its path; 1 with a message on stderr where that is not possible."""
    try:
        path = write_report(arguments.trace, arguments.output, arguments.tokenizer, arguments.session)
    except ReportError as error:
        print(f"intentkv report: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


def write_report(trace: Path, output: Path, tokenizer: str | None = None, session: str | None = None) -> Path:
    """Make the report at `output`, whole or not at all, readable by its owner only: it holds what the trace held.

    Raises:
        ReportError: the trace or the tokenizer cannot be read, or the file cannot be written.
    """
    decoder = Numbers() if tokenizer is None else TokenizerText(tokenizer)
    html = render(build_page(read_trace(trace), decoder, session))
    try:
        file, part = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")  # made with mode 0600
        try:
            with open(file, "w", encoding="utf-8", errors="replace") as opened:
                opened.write(html)
            os.replace(part, output)
        except BaseException:
            os.unlink(part)
            raise
    except OSError as error:
        raise ReportError(f"cannot write {output}: {error}") from error
    return output.resolve()
