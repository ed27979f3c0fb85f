"""The operations of a program: their names, numbers and types. csrc/core/program.h has the same table."""

from typing import NamedTuple

# The type of a value: float (the accumulators' dtype), an integer of the same width, or a bool.
FLOAT, INT, BOOL = "F", "I", "B"


class Operation(NamedTuple):
    """A row of the table: number in an encoded program, types of the arguments, type of the result."""

    number: int
    arguments: str
    result: str


# "name arguments>result", in the order of csrc/core/program.h. A test compares the two files.
_TABLE = """
    float_constant >F    int_constant >I    bool_constant >B
    batch >I             head >I            query >I           key >I
    score >F             gradient >F
    add FF>F             subtract FF>F      multiply FF>F      divide FF>F
    minimum FF>F         maximum FF>F       power FF>F
    negate F>F           absolute F>F       sign F>F
    floor F>F            ceil F>F           truncate F>F       round F>F
    square_root F>F      reciprocal_root F>F
    exp F>F              exp2 F>F           expm1 F>F
    log F>F              log2 F>F           log1p F>F
    tanh F>F             sigmoid F>F        erf F>F            sine F>F           cosine F>F
    select BFF>F         less FF>B          less_equal FF>B    equal FF>B
    int_add II>I         int_subtract II>I  int_multiply II>I
    int_divide II>I      int_truncated_divide II>I             int_modulo II>I
    int_minimum II>I     int_maximum II>I   int_absolute I>I
    int_and II>I         int_or II>I        int_xor II>I       int_not I>I
    shift_left II>I      shift_right II>I
    int_select BII>I     int_less II>B      int_less_equal II>B int_equal II>B
    bool_and BB>B        bool_or BB>B       bool_xor BB>B      bool_not B>B
    int_to_float I>F     float_to_int F>I   bool_to_int B>I
    wrap_index I>I       gather I>F         gather_int I>I     scatter_add IF>F
"""

OPERATIONS: dict[str, Operation] = {}
_words = _TABLE.split()
for _name, _types in zip(_words[::2], _words[1::2], strict=True):
    _arguments, _result = _types.split(">")
    OPERATIONS[_name] = Operation(len(OPERATIONS), _arguments, _result)
