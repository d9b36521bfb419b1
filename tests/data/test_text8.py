"""The two cleanings, on markup whose visible text is known."""

from damcha_jax.data.text8 import clean_rst, clean_wikitext, normalize

WIKI = b"""<page><title>Hidden</title><text xml:space="preserve">#REDIRECT [[Other]]</text></page>
<page><title>Gone</title><text xml:space="preserve">{{Infobox|x=1}}
'''Anarchism''' is a [[political philosophy|philosophy]] of 1999&amp;mdash;see
[http://example.org/a the site], [[Image:flag.png|thumb|250px|A black flag]]
&lt;b&gt;bold&lt;/b&gt; &lt;ref name=x&gt;a note&lt;/ref&gt;
[[fr:Anarchisme]] [[Category:Politics|Anarchism]]</text></page>"""

RST = b""".. _tut-csv:

:mod:`csv` --- Reading
======================

.. module:: csv
   :synopsis: Tables.

.. sectionauthor:: Someone <x@example.org>

.. function:: reader(csvfile, dialect='excel')

   Uses :rfc:`4180` and :meth:`!__next__`, see `the site <https://example.org/q>`_ or
   https://example.org/visible.  ``x = 2``

.. note:: Careful.
"""


def test_normalize_spells_digits_and_keeps_single_spaces():
  assert normalize(b"  A-1,\n\xc3\xa9b 20\tC ") == b"a one b two zero c"
  assert normalize(b"0123456789") == b"zero one two three four five six seven eight nine"
  assert normalize(b"") == b""


def test_wiki_markup():
  assert clean_wikitext(WIKI) == (
      b"anarchism is a philosophy of one nine nine nine see the site a black flag bold politics")


def test_a_dump_may_begin_and_end_inside_an_article():
  assert clean_wikitext(b"tail of one</text><title>T</title><text>start [[of]] two") == (
      b"tail of one start of two")
  assert clean_wikitext(b"<title>no text</title>") == b""


def test_rst_markup():
  assert clean_rst(RST) == (
      b"csv reading tables reader csvfile dialect excel uses rfc four one eight zero and next "
      b"see the site or x two careful")
