"""What the detectors find in a text, and what they must leave alone."""

from __future__ import annotations

import pytest

from ridgeline.gateway.guard.config import DEFAULT_REGIONS, KINDS
from ridgeline.gateway.guard.phones import PhoneDetector
from ridgeline.gateway.guard.scanner import Scanner, built_in
from tests.gateway.guard.corpus import corpus
from tests.gateway.guard.measure import measure

SCANNER = Scanner(built_in(KINDS, PhoneDetector(DEFAULT_REGIONS, False)))
# What Presidio finds by default it finds without a word before: so must we, when asked to.
WIDE = Scanner(built_in(KINDS, PhoneDetector(DEFAULT_REGIONS, True)))


def found(text: str, scanner: Scanner = SCANNER) -> list[tuple[str, str]]:
    return [(finding.kind, text[finding.start : finding.end]) for finding in scanner.findings(text)]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("mailto:a.b+c@ex-ample.co.uk?x=1", "email", "a.b+c@ex-ample.co.uk"),
        ("?email=a@b.org&x=1", "email", "a@b.org"),
        ("user%40example.com", "email", "user%40example.com"),
        ("我的邮箱是a@b.com。", "email", "a@b.com"),
        ("jürgen@müller.de schrieb", "email", "jürgen@müller.de"),
        ("Tel.: 030/1234567", "phone", "030/1234567"),
        ("(+43 664 1234567)", "phone", "+43 664 1234567"),
        ("٠٦ ١٢ ٣٤ ٥٦ ٧٨", "phone", "٠٦ ١٢ ٣٤ ٥٦ ٧٨"),
        ("my cell is 555 0142", "phone", "555 0142"),
        ("4111\u00a01111\u00a01111\u00a01111 exp 12/26", "card", "4111\u00a01111\u00a01111\u00a01111"),
        ("378282246310005.", "card", "378282246310005"),
        ("IBAN: gb29 nwbk 6016 1331 9268 19 bitte", "iban", "gb29 nwbk 6016 1331 9268 19"),
        ("DE89-3704-0044-0532-0130-00", "iban", "DE89-3704-0044-0532-0130-00"),
        ("http://10.0.0.7:8080/x", "ip", "10.0.0.7"),
        ("addr:2001:db8::1, next", "ip", "2001:db8::1"),
        ("[fe80::1%eth0]:53", "ip", "fe80::1%eth0"),
        ("SSN 123-45-6789.", "ssn", "123-45-6789"),
        ("key sk-ant-api03-abcdefghijklmnopqrstuvwx", "secret", "sk-ant-api03-abcdefghijklmnopqrstuvwx"),
        ("AKIAIOSFODNN7EXAMPLE", "secret", "AKIAIOSFODNN7EXAMPLE"),
        ("postgres://app:pa%2Fss@db/x", "secret", "pa%2Fss"),
        ("Server=x;Password=abc;Uid=y", "secret", None),
        ("Password=abcd;Uid=y", "secret", "abcd"),
        ("password: 'correct horse battery'", "secret", "correct horse battery"),
        ("das Passwort lautet Sommer24!", "secret", "Sommer24"),
        ("密码是abc123", "secret", "abc123"),
        ("Authorization: Bearer abcdefghij0123456789", "secret", "abcdefghij0123456789"),
    ],
)
def test_a_value_is_found_in_its_surroundings(text, kind, value):
    assert found(text) == ([(kind, value)] if value is not None else [])


@pytest.mark.parametrize(
    "text",
    [
        "4111 1111 1111 1112",  # Luhn
        "DE89370400440532013001",  # mod 97
        "XX89370400440532013000",  # no such country
        "999.1.1.1 and 1.2.3 and v10.0.0.1",
        "12:30:45 and aa:bb:cc:dd:ee:ff and std::vector",
        "000-45-6789 and 123-00-4567",
        "550e8400-e29b-41d4-a716-446655440000",
        "9b74c9897bac770ffc029102a200c5de",
        "on 2024-05-06 at 12.05.2024, from 06/07/2023",
        "1.234.567,89 and 0.123456789 and 12 345 678",
        "password: please reset it below; the token: invalid",
        'password = os.environ["PW"]; password = ${PW}; password = None',
        "max_tokens = 4096; key = value; token_count: 128",
        "icon@2x.png and pkg@1.2.3",
        "call it 113804.432, text 2048 1529.0, items[::2] and x[1::]",
        "password = read_secret(path); token_file = /etc/abc1234/x1y2z3",
    ],
)
def test_what_only_looks_like_one_is_left_alone(text):
    assert found(text) == []


def test_a_broken_pem_block_is_a_secret_to_its_end():
    text = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA7\nabcdefghijklmnop"
    assert found(text) == [("secret", text)]


def test_recall_on_the_corpus_is_as_promised():
    scores = measure(
        corpus(1200, seed=11), SCANNER.findings, ("email", "phone", "card", "iban", "ip", "secret")
    )
    for kind, score in scores.items():
        assert score.values > 150
        assert score.recall >= 0.99, (kind, score.missed)
        assert score.precision >= 0.95, (kind, score.wrong)


def test_phone_numbers_of_every_country_are_found_as_the_library_writes_them():
    """Examples from elsewhere: with + of all countries, national of those that are configured."""
    library = pytest.importorskip("phonenumbers")
    styles, kinds = library.PhoneNumberFormat, library.PhoneNumberType
    missed, asked = [], 0
    for region in sorted(library.SUPPORTED_REGIONS):
        numbers = [library.example_number_for_type(region, kind) for kind in (kinds.FIXED_LINE, kinds.MOBILE)]
        wanted = [styles.E164, styles.INTERNATIONAL] + [styles.NATIONAL] * (region in DEFAULT_REGIONS)
        for number in filter(None, numbers):
            for style in wanted:
                text = library.format_number(number, style)
                asked += 1
                missed += [text] if found(f"Please use {text}, thanks.") != [("phone", text)] else []
    assert asked > 1000
    assert len(missed) <= asked * 0.01, missed
    assert not [text for text in missed if text.startswith("+")]


def test_everything_presidio_finds_by_pattern_is_found_here():
    presidio = pytest.importorskip("presidio_analyzer.predefined_recognizers")
    recognizers = {
        "email": presidio.EmailRecognizer(),
        "phone": presidio.PhoneRecognizer(),
        "card": presidio.CreditCardRecognizer(),
        "iban": presidio.IbanRecognizer(),
        "ip": presidio.IpRecognizer(),
    }
    compared = 0
    for sample in corpus(260, seed=23):
        values = {kind for _, _, kind in sample.gold}
        ours = {at for start, end, _ in WIDE.findings(sample.text) for at in range(start, end)}
        for kind in values & set(recognizers):
            for result in recognizers[kind].analyze(sample.text, recognizers[kind].supported_entities):
                # Presidio also takes parts of other numbers for one of its kinds: only values count.
                if result.score < 0.4 or not any(
                    of == kind and start <= result.start and result.end <= end
                    for start, end, of in sample.gold
                ):
                    continue
                compared += 1
                missing = [
                    at
                    for at in range(result.start, result.end)
                    if at not in ours and sample.text[at].isalnum()
                ]
                assert not missing, (kind, sample.text[result.start : result.end], sample.text)
    assert compared > 80
