"""A terminal of a test."""

import io
import re

CODES = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|\x1b\[\?25[lh]|(\r)|(\n)|([^\x1b\r\n]+)")


class Terminal(io.StringIO):
    """A terminal that can say what its user sees."""

    def isatty(self):
        return True

    @property
    def screen(self):
        lines, at = [""], 0
        for number, letter, home, newline, text in CODES.findall(self.getvalue()):
            if letter == "A":
                at -= int(number)
            elif letter == "K" or home:  # the display comes home only to erase
                lines[at] = ""
            elif newline:
                at += 1
                lines += [""] * (at == len(lines))
            else:
                lines[at] += text
        return lines
