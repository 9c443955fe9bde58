"""Frequent short English words: one token each in nearly every tokenizer, most frequent first.

For servers whose tokenizer is not available locally; `vocabulary` checks them against the server.
"""

from __future__ import annotations

COMMON_WORDS: tuple[str, ...] = tuple(
    """
    the and for are but not you all any can had her was one our out day get has him his how man new now
    old see two way who boy did its let put say she too use that with have this will your from they know
    been good much some time very when come here just like long make many more only over such take than
    well were what word work year back call each even find first give great hand help high home kind last
    left life line live look made most move must name need never next part place play point read right
    same show side small sound still there these thing think three through under water where which while
    world would write about after again air also always animal another answer around away because before
    being below between book both boys build car change children city close could country cut does done
    door down draw earth end every example eye face family far father field fire five follow food form
    four friend full game girl group half hard head heat hold horse hot hour house idea inch into keep
    king land large late later learn leave letter light list listen little local map mark mean men mile
    money mother music near night nothing number often once open order own page paper people person
    picture piece plan plane plant power press problem product pull question quick quiet rain ready real
    red rest river road rock room round rule run sea second self set ship short should sing sit six sleep
    slow song soon special stand star start state step stop story street strong sun surface system table
    talk ten test those though today top town tree true try turn unit until usual voice wait walk wall war
    watch week weight went west white whole why wind wood
    """.split()  # noqa: SIM905 - a list of strings would be three times as long
)
