"""Texts with personal data and secrets in known places, made up from a seed: what recall and precision are
measured on, here and in benchmarks/gateway_guard.py.

Formats are written down from numbering plans, registries and providers' documentation, as generators; nothing
is shared with the detectors. No names of people: those are NER's. Negatives are numbers and codes of daily
life that are none of it.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import random
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass

KINDS = ("email", "phone", "card", "iban", "ip", "secret")
HEX = "0123456789abcdef"
ALNUM = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Sample:
    text: str
    gold: tuple[tuple[int, int, str], ...]  # start, end, kind
    language: str = ""
    form: str = ""  # which format, for the list of what was missed


# ---- values ----


def digits(rng: random.Random, count: int, first: str = "0123456789") -> str:
    return rng.choice(first) + "".join(rng.choice(string.digits) for _ in range(count - 1)) if count else ""


def letters(rng: random.Random, count: int, alphabet: str = ALNUM) -> str:
    return "".join(rng.choice(alphabet) for _ in range(count))


def filled(rng: random.Random, mask: str) -> str:
    """`#` any digit, `%` a digit from 2 to 9, everything else as it is."""
    return "".join(
        rng.choice(string.digits) if c == "#" else rng.choice("23456789") if c == "%" else c for c in mask
    )


WORDS = "anna lee office info sales jonas maria support team dev nora kim ops billing hello press".split()  # noqa: SIM905
HOSTS = "example acme-corp northwind contoso mail.internal fabrikam sub.dept.uni zeta9 my-company".split()  # noqa: SIM905
ENDS = "com org net io dev co.uk de fr es it com.br co.jp nl pl info museum travel eu cn app".split()  # noqa: SIM905


def email(rng: random.Random) -> tuple[str, str]:
    one, two = rng.choice(WORDS), rng.choice(WORDS)
    number = str(rng.randrange(1, 9999))
    local = rng.choice([
        one, f"{one}.{two}", f"{one}_{two}", f"{one}-{two}", f"{one}{number}", f"{one[0]}.{two}",
        f"{one}+{two}",
        f"{one}.{two}+tag{number}", f"{one.title()}.{two.title()}", one.upper(), f"{number}{one}", f"o'{two}",
        f"{one}.{two}.{number}", f"_{one}", "jürgen." + two, "søren", "иван.петров",
    ])  # fmt: skip
    host = rng.choice([
        *[f"{name}.{rng.choice(ENDS)}" for name in HOSTS], "müller-online.de", "xn--mller-kva.de", "почта.рф",
        "EXAMPLE.COM", f"mx{number}.example.org",
    ])  # fmt: skip
    return f"{local}@{host}", "email"


# Masks of national and international numbers, by country, as people write them.
PHONES = {
    "US": ["(212) %##-####", "415-%##-####", "646.%##.####", "305 %##-####", "312 %## ####", "1-800-%##-####",
           "+1 212 %## ####", "+1 (415) %##-####", "+1-646-%##-####", "+1.305.%##.####", "+1312%######",
           "1 (713) %##-####",
           "(917)%##-####"],
    "GB": ["020 7### ####", "07700 9#####", "0161 496 0###", "+44 20 7### ####", "+44 (0)20 7### ####",
           "+44 7700 9#####",
           "0044 20 7### ####", "(0121) 496 0###", "+447700 9#####", "01632 960###", "07911 12####"],
    "DE": ["030 ########", "030/2#######", "0151 2#######", "+49 30 2#######", "+49 (0) 89 2######",
           "0049 151 2#######",
           "(040) 3######", "0171-2######", "+49-221-2######", "+49 151 2#######", "089 / 2#######",
           "0160 9#### ###"],
    "FR": ["01 42 ## ## ##", "06 12 ## ## ##", "06.12.##.##.##", "+33 6 12 ## ## ##",
           "+33 (0)1 42 ## ## ##", "0033 6 12 ## ## ##",
           "07-81-##-##-##", "0612######", "+33612######"],
    "ES": ["612 ### ###", "612 ## ## ##", "91 5## ## ##", "+34 612 ### ###", "+34 91 5## ## ##",
           "0034 612 ### ###", "93-4##-##-##"],
    "IT": ["347 %## ####", "06 4### ####", "+39 347 %## ####", "+39 06 4### ####", "02 8###-####"],
    "NL": ["06-1#######", "020-5## ####", "+31 6 1#######", "06 1### ####", "+31 (0)20 5## ####"],
    "BR": ["(11) 9%###-####", "(21) 3%##-####", "+55 11 9%###-####", "+55 (21) 9%###-####"],
    "IN": ["98### #####", "+91 98### #####", "+91-98########", "098### #####", "+91 22 2### ####"],
    "JP": ["03-3###-####", "090-1###-####", "+81 3-3###-####", "+81 90 1### ####"],
    "CN": ["138 #### ####", "+86 138 #### ####", "010-6### ####", "+86 10 6### ####"],
    "AU": ["0412 ### ###", "(02) 9### ####", "+61 412 ### ###", "+61 2 9### ####"],
    "CH": ["079 %## ## ##", "044 %## ## ##", "+41 79 %## ## ##", "0041 79 %## ## ##"],
    "AT": ["0664 2######", "+43 664 2######", "01 5## ## ##0"],
    "PL": ["601 ### ###", "+48 601 ### ###", "22 6## ## ##"],
    "SE": ["070-1## ## ##", "+46 70 1## ## ##"],
    "KR": ["010-2###-####", "+82 10-2###-####"],
    "MX": ["55 5### ####", "+52 55 5### ####"],
    "ZA": ["082 %## ####", "+27 82 %## ####"],
    "other": ["+971 50 1## ####", "+65 9### ####", "+234 803 ### ####", "+966 50 1## ####",
           "+7 916 ###-##-##", "+380 67 ### ## ##",
              "+351 912 ### ###", "+353 87 1## ####", "+90 532 ### ## ##", "+972 50-1##-####",
              "+64 21 ### ###", "+45 20 ## ## ##",
              "+47 912 ## ###", "+358 40 ### ####", "+30 697 ### ####", "+420 601 ### ###",
              "+36 30 ### ####", "+54 9 11 2### ####",
              "+56 9 6### ####", "+57 301 ### ####", "+62 812 #### ####", "+63 917 ### ####",
              "+66 81 ### ####", "+84 91 ### ####"],
}  # fmt: skip
# Bare digits and short numbers, as they stand behind a word that says what they are.
NAMED_PHONES = [
    "415%######",
    "%##-####",
    "0301#######",
    "4915112######",
    "06 ## ## ## ##",
    "138########",
    "%## ####",
]
PHONE_WORDS = ["Phone: {}", "Tel. {}", "call {}", "mobile {}", "WhatsApp {}", "Telefon: {}", "Tél. : {}",
"Teléfono: {}",
               "phone number is {}", "电话：{}", "手机号 {}", "cell: {}", "fax {}", "telefone {}",
               "телефон: {}"]  # fmt: skip


def phone(rng: random.Random) -> tuple[str, str]:
    country = rng.choice(list(PHONES))
    return filled(rng, rng.choice(PHONES[country])), f"phone {country}"


def luhn_digit(number: str) -> str:
    total = 0
    for place, digit in enumerate(reversed(number)):
        value = int(digit) * (2 if place % 2 == 0 else 1)
        total += value - 9 if value > 9 else value
    return str(-total % 10)


CARDS = [
    ("visa", "4", 16), ("visa", "4", 16), ("visa 13", "4", 13), ("visa 19", "4", 19), ("mastercard", "51",
    16),
    ("mastercard", "55", 16), ("mastercard 2", "2221", 16), ("mastercard 2", "2720", 16), ("amex", "34", 15),
    ("amex", "37", 15), ("discover", "6011", 16), ("discover", "65", 16), ("jcb", "3528", 16), ("diners",
    "36", 14),
    ("diners", "300", 14), ("unionpay", "62", 16), ("unionpay 19", "62", 19), ("maestro", "5018", 16),
    ("maestro 18", "6304", 18),
]  # fmt: skip


def card(rng: random.Random) -> tuple[str, str]:
    name, prefix, length = rng.choice(CARDS)
    number = prefix + digits(rng, length - len(prefix) - 1)
    number += luhn_digit(number)
    sizes = {15: [4, 6, 5], 14: [4, 6, 4], 13: [4, 4, 4, 1], 18: [4, 4, 4, 4, 2], 19: [4, 4, 4, 4, 3]}.get(
        length, [4] * 4
    )
    separator = rng.choice(["", "", " ", " ", "-", "\u00a0", "."])
    parts, at = [], 0
    for size in sizes:
        parts.append(number[at : at + size])
        at += size
    return separator.join(parts), f"card {name} {separator!r}"


# Structure of the account part, as the registry writes it: n digits, a capital letters, c either.
IBANS = {
    "DE": "18n", "GB": "4a14n", "FR": "10n11c2n", "ES": "20n", "IT": "1a10n12c", "NL": "4a10n", "BE": "12n",
    "CH": "5n12c",
    "AT": "16n", "PL": "24n", "PT": "21n", "SE": "20n", "NO": "11n", "DK": "14n", "FI": "14n",
    "IE": "4a14n", "LU": "3n13c",
    "CZ": "20n", "SK": "20n", "HU": "24n", "RO": "4a16c", "GR": "7n16c", "TR": "5n1n16c", "AE": "3n16n",
    "SA": "2n18c",
    "IL": "19n", "BR": "23n1a1c", "MT": "4a5n18c", "LT": "16n", "EE": "16n", "LV": "4a13c", "HR": "17n",
    "SI": "15n",
    "BG": "4a6n8c", "UA": "6n19c", "QA": "4a21c", "KZ": "3n13c", "GE": "2a16n", "CY": "8n16c",
    "LI": "5n12c", "MC": "10n11c2n",
}  # fmt: skip


def iban(rng: random.Random) -> tuple[str, str]:
    country = rng.choice(list(IBANS))
    account, count = "", ""
    for character in IBANS[country]:
        if character.isdigit():
            count += character
            continue
        alphabet = {
            "n": string.digits,
            "a": string.ascii_uppercase,
            "c": string.digits + string.ascii_uppercase,
        }[character]
        account += letters(rng, int(count), alphabet)
        count = ""
    number = "".join(
        str(string.digits.find(c)) if c.isdigit() else str(ord(c) - 55) for c in account + country + "00"
    )
    whole = f"{country}{98 - int(number) % 97:02d}{account}"
    style = rng.choice(["compact", "compact", "spaces", "spaces", "dashes", "lower", "nbsp"])
    groups = [whole[at : at + 4] for at in range(0, len(whole), 4)]
    written = {
        "compact": whole,
        "spaces": " ".join(groups),
        "dashes": "-".join(groups),
        "lower": whole.lower(),
        "nbsp": "\u00a0".join(groups),
    }[style]
    return written, f"iban {country} {style}"


def ip(rng: random.Random) -> tuple[str, str]:
    four = str(ipaddress.IPv4Address(rng.randrange(0x01000000, 0xDFFFFFFF)))
    six = ipaddress.IPv6Address(rng.getrandbits(128))
    short = ipaddress.IPv6Address((0x20010DB8 << 96) | rng.getrandbits(16))
    return rng.choice([
        (four, "ip 4"), (four, "ip 4"), (f"10.{rng.randrange(256)}.{rng.randrange(256)}.1", "ip 4"),
        (f"192.168.1.{rng.randrange(255)}", "ip 4"),
        (str(six), "ip 6"), (six.exploded, "ip 6 full"), (str(short), "ip 6 short"), (str(six).upper(),
        "ip 6 capitals"),
        (f"fe80::{rng.getrandbits(16):x}", "ip 6 link"), (f"fe80::{rng.getrandbits(16):x}%eth0",
        "ip 6 zone"), (f"::ffff:{four}", "ip 6 mapped"),
        ("::1", "ip 6 loop"), (f"{four}/24", "ip 4 net"), (f"2001:db8:{rng.getrandbits(16):x}::/48",
        "ip 6 net"),
    ])  # fmt: skip


def _jwt(rng: random.Random) -> str:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    claims = {"sub": digits(rng, 10), "iat": rng.randrange(10**9, 2 * 10**9), "scope": "read"}
    signature = base64.urlsafe_b64encode(rng.randbytes(32)).decode().rstrip("=")
    return ".".join([part({"alg": "HS256", "typ": "JWT"}), part(claims), signature])


def _pem(rng: random.Random) -> str:
    name = rng.choice(
        ["RSA PRIVATE KEY", "PRIVATE KEY", "EC PRIVATE KEY", "OPENSSH PRIVATE KEY", "ENCRYPTED PRIVATE KEY"]
    )
    body = base64.b64encode(rng.randbytes(rng.randrange(120, 1200))).decode()
    lines = [body[at : at + 64] for at in range(0, len(body), 64)]
    return "\n".join([f"-----BEGIN {name}-----", *lines, f"-----END {name}-----"])


URL64 = ALNUM + "-_"
KEYS: list[tuple[str, Callable[[random.Random], str]]] = [
    ("openai", lambda r: "sk-" + letters(r, 48)),
    ("openai project", lambda r: "sk-proj-" + letters(r, 120, URL64)),
    ("anthropic", lambda r: "sk-ant-api03-" + letters(r, 93, URL64) + "AA"),
    ("aws id", lambda r: r.choice(["AKIA", "ASIA"]) + letters(r, 16, string.ascii_uppercase + "234567")),
    ("gcp", lambda r: "AIza" + letters(r, 35, URL64)),
    ("google token", lambda r: "ya29." + letters(r, 80, URL64)),
    ("github", lambda r: r.choice(["ghp_", "gho_", "ghs_", "ghu_"]) + letters(r, 36)),
    ("github fine", lambda r: "github_pat_" + letters(r, 22) + "_" + letters(r, 59)),
    ("gitlab", lambda r: "glpat-" + letters(r, 20, URL64)),
    ("slack", lambda r: f"xoxb-{digits(r, 12)}-{digits(r, 13)}-{letters(r, 24)}"),
    ("stripe", lambda r: r.choice(["sk_live_", "rk_live_", "sk_test_"]) + letters(r, 24)),
    ("stripe hook", lambda r: "whsec_" + letters(r, 32)),
    ("jwt", _jwt),
    ("pem", _pem),
    ("azure ad", lambda r: letters(r, 3) + "8Q~" + letters(r, 34, ALNUM + "-_.~")),
    ("sendgrid", lambda r: "SG." + letters(r, 22, URL64) + "." + letters(r, 43, URL64)),
    ("npm", lambda r: "npm_" + letters(r, 36)),
    ("pypi", lambda r: "pypi-AgEIcHlwaS5vcmc" + letters(r, 100, URL64)),
    ("huggingface", lambda r: "hf_" + letters(r, 34)),
    ("telegram", lambda r: digits(r, 10, "123456789") + ":AA" + letters(r, 33, URL64)),
    ("twilio", lambda r: "SK" + letters(r, 32, HEX)),
    ("digitalocean", lambda r: "dop_v1_" + letters(r, 64, HEX)),
    ("shopify", lambda r: "shpat_" + letters(r, 32, HEX)),
    ("vault", lambda r: "hvs." + letters(r, 90, URL64)),
]  # fmt: skip


def _password(rng: random.Random) -> str:
    word = rng.choice(["hunter", "Sommer", "correct", "Tr0ub4dor", "dragon", "Winter"])
    return (
        word
        + rng.choice(["", "!", "#", "&", "_x"])
        + digits(rng, rng.randrange(1, 5))
        + rng.choice(["", "!", "$"])
    )


# What stands around the secret says that it is one.
NAMED_KEYS: list[tuple[str, str, Callable[[random.Random], str]]] = [
    ("assignment", "password = {}", _password),
    ("assignment", "PASSWORD={}", _password),
    ("assignment", 'db_password: "{}"', _password),
    ("assignment", "passwd='{}'", _password),
    ("json", '{{"user": "svc", "password": "{}"}}', _password),
    ("prose", "my password is {}", _password),
    ("prose", "Das Passwort lautet {}", _password),
    ("prose", "mot de passe : {}", _password),
    ("prose", "contraseña: {}", _password),
    ("prose", "密码是{}", _password),
    ("url", "postgres://app:{}@db.internal:5432/prod", lambda r: letters(r, 14)),
    ("url", "redis://:{}@cache:6379/0", lambda r: letters(r, 20)),
    ("url", "mongodb+srv://root:{}@cluster0.mongodb.net/test", lambda r: letters(r, 12)),
    ("url", "amqp://guest:{}@mq/vhost", _password),
    ("ado", "Server=sql1;Database=crm;User Id=sa;Password={};", _password),
    ("azure storage", "AccountName=acme;AccountKey={}", lambda r: base64.b64encode(r.randbytes(64)).decode()),
    ("azure sas", "https://x.blob.core.windows.net/c?sv=2022&sig={}", lambda r: letters(r, 44)),
    ("aws secret", "aws_secret_access_key = {}", lambda r: letters(r, 40, ALNUM + "/+")),
    ("bearer", "Authorization: Bearer {}", lambda r: letters(r, 40)),
    ("bearer", 'curl -H "Authorization: Bearer {}" https://api', lambda r: letters(r, 32)),
    ("basic", "Authorization: Basic {}", lambda r: base64.b64encode(b"user:" + r.randbytes(12)).decode()),
    ("api key", "X-API-Key: {}", lambda r: letters(r, 32, HEX)),
    ("api key", 'api_key="{}"', lambda r: letters(r, 32)),
    ("api key", "export SERVICE_TOKEN={}", lambda r: letters(r, 40)),
    ("api key", "the API key is {}", lambda r: letters(r, 36)),
    ("api key", '"client_secret": "{}"', lambda r: letters(r, 30, URL64)),
    ("api key", "https://api.example.com/v1?api_key={}", lambda r: letters(r, 32, HEX)),
]  # fmt: skip


def secret(rng: random.Random) -> tuple[str, str]:
    name, make = rng.choice(KEYS)
    return make(rng), f"secret {name}"


MAKERS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "email": email, "phone": phone, "card": card, "iban": iban, "ip": ip, "secret": secret,
}  # fmt: skip

# ---- texts ----

# {} is the value. Prose in several languages, and the shapes that data comes in.
TEMPLATES = {
    "en": ["Please send it to {} before Friday.", "My details: {}. Thanks!",
           "I noted {} on the form, is that right?",
           "Could you check {}? It does not work.", "({})", "He wrote \"{}\" on a napkin.",
           "It was {}, I think, or so they said."],
    "de": ["Bitte verwenden Sie {} für Rückfragen.", "Meine Angaben lauten {}; bitte bestätigen.",
           "Es geht um {}, wie besprochen."],
    "fr": ["Merci d’utiliser {} pour la suite.", "Voici mes coordonnées : {}.", "C’est bien {} ?"],
    "es": ["Por favor use {} para todo.", "Mis datos son: {}.", "¿Es correcto {}?"],
    "it": ["I miei dati: {}, grazie.", "Usi pure {} se serve."],
    "pt": ["Meus dados são {}, obrigado.", "Pode usar {} sempre."],
    "pl": ["Proszę użyć {} w tej sprawie.", "Moje dane: {}."],
    "nl": ["Gebruik {} voor vragen.", "Mijn gegevens zijn {}."],
    "ru": ["Пожалуйста, используйте {} для связи.", "Мои данные: {}."],
    "zh": ["请使用 {} 联系我。", "我的信息是：{}，谢谢。"],
    "ja": ["こちらです：{} よろしくお願いします。", "連絡先は {} です。"],
    "ar": ["يرجى استخدام {} من فضلك."],
    "csv": ["17,{},active,2024-03-01", "a;b;{};c", "id\tvalue\n9\t{}\n"],
    "json": ['{{"value": "{}", "n": 3}}', '[{{"k":"{}"}},{{"k":null}}]'],
    "yaml": ["contact:\n  value: {}\n  since: 2021", "- {}\n- none\n"],
    "log": ["2024-05-06T12:30:45Z INFO request from user value={} status=200",
           "[warn] {} rejected (3 tries)"],
    "markdown": ["| field | value |\n|---|---|\n| x | {} |\n", "**{}**", "- [ ] check `{}` today"],
    "html": ["<td>{}</td>", '<p class="c">{}</p>'],
    "code": ["value = '{}'  # from the ticket", 'send("{}", retries=3)'],
    "lines": ["Hi,\n\n{}\n\nBest", "first\r\n{}\r\nlast"],
}  # fmt: skip


def _day(rng: random.Random) -> str:
    return f"{rng.randrange(2000, 2026)}-1{rng.randrange(3)}-2{rng.randrange(9)}"


NEGATIVES: list[Callable[[random.Random], str]] = [
    lambda r: f"Order #{digits(r, 8)} was shipped.",
    lambda r: f"order number {digits(r, 10, '123456789')} is late",
    lambda r: f"Invoice INV-{r.randrange(2019, 2026)}-{digits(r, 6)} is due.",
    lambda r: f"Ticket ABC-{digits(r, 5)} blocks DEF-{digits(r, 4)}.",
    lambda r: f"released v{r.randrange(20)}.{r.randrange(30)}.{r.randrange(100)} on {_day(r)}",
    lambda r: f"version {r.randrange(20)}.{r.randrange(30)}.{r.randrange(100)}-rc{r.randrange(9)}",
    lambda r: f"The meeting is on 1{r.randrange(9)}.0{r.randrange(1, 9)}.2024 at 1{r.randrange(9)}:30.",
    lambda r: f"Between 0{r.randrange(1, 9)}/1{r.randrange(9)}/2023 and 12/31/2024.",
    lambda r: f"{_day(r)}T1{r.randrange(9)}:22:33.{digits(r, 6)}Z started",
    lambda r: f"commit {letters(r, 40, HEX)}",
    lambda r: f"sha256:{letters(r, 64, HEX)}",
    lambda r: f"md5 {letters(r, 32, HEX)} matches",
    lambda r: f"id {uuid.UUID(int=r.getrandbits(128))} not found",
    lambda r: f"trace_id={letters(r, 32, HEX)} span={letters(r, 16, HEX)}",
    lambda r: (
        f"The price is {r.randrange(1, 999)},{digits(r, 3)}.{digits(r, 2)} EUR for "
        f"{r.randrange(2, 90)} units."
    ),
    lambda r: f"1 {digits(r, 3)} {digits(r, 3)} inhabitants and {digits(r, 2)}.{digits(r, 4)} km²",
    lambda r: f"lat {r.uniform(-90, 90):.6f}, lon {r.uniform(-180, 180):.6f}",
    lambda r: f"unix time {r.randrange(10**9, 2 * 10**9)} or {r.randrange(10**12, 2 * 10**12)} ms",
    lambda r: (
        f"Chapters {r.randrange(1, 9)}-{r.randrange(10, 20)}, pages "
        f"{r.randrange(100, 400)}–{r.randrange(401, 900)}."
    ),
    lambda r: f"MAC {':'.join(letters(r, 2, HEX) for _ in range(6))}",
    lambda r: f"colour #{letters(r, 6, HEX)} on #{letters(r, 6, HEX)}",
    lambda r: f"It took {r.random():.9f} s, then {r.random() * 1000:.3f} ms; speedup {r.random() * 9:.2f}x.",
    lambda r: f"std::vector<int> v({r.randrange(9999)}); foo::bar(x, {r.randrange(99)});",
    lambda r: f"max_tokens = {r.randrange(1, 9999)}, temperature: 0.{r.randrange(9)}, top_p=1.0",
    lambda r: "Reset your password: click the link below. The token was invalid.",
    lambda r: "The key idea: keep the secret ingredient secret. A password is required.",
    lambda r: f"SKU {letters(r, 3, string.ascii_uppercase)}{digits(r, 4)}-{digits(r, 3)}",
    lambda r: (
        f"2{digits(r, 2)} × 1{digits(r, 2)} = {r.randrange(10**4, 10**5)}; 10^{r.randrange(9)}; "
        f"{r.randrange(9)}/{r.randrange(10, 99)}"
    ),
    lambda r: (
        f"@mention and #hash, see file a{r.randrange(99)}@2x.png or "
        f"pkg@{r.randrange(9)}.{r.randrange(9)}.{r.randrange(9)}"
    ),
    lambda r: (
        f"ratio 16:9, time {r.randrange(10, 24)}:{r.randrange(10, 60)}:{r.randrange(10, 60)}, "
        f"score {r.randrange(9)}:{r.randrange(9)}"
    ),
    lambda r: f"ISBN 978-3-16-{digits(r, 6)}-{r.randrange(10)}",
    lambda r: f"ticket reference {digits(r, 3)}-{digits(r, 7)} of {digits(r, 12, '7')}",
]  # fmt: skip


def positive(rng: random.Random, kind: str) -> Sample:
    """One value in one text."""
    if kind == "secret" and rng.random() < 0.5:
        name, around, make = rng.choice(NAMED_KEYS)
        value = make(rng)
        inner, form = around.format(value), f"secret {name}"
    elif kind == "phone" and rng.random() < 0.2:
        value, form = filled(rng, rng.choice(NAMED_PHONES)), "phone named"
        inner = rng.choice(PHONE_WORDS).format(value)
    else:
        value, form = MAKERS[kind](rng)
        inner = value
    language = rng.choice(list(TEMPLATES))
    template = rng.choice(TEMPLATES[language])
    escaped = language in ("json", "html", "code") and ('"' in inner or "\n" in inner or "'" in inner)
    text = inner if escaped else template.format(inner)
    start = text.index(inner) + inner.index(value)
    return Sample(text, ((start, start + len(value), kind),), language, form)


def mixed(rng: random.Random) -> Sample:
    """Several values of several kinds in one text."""
    text, gold = "", []
    for kind in rng.sample(KINDS, rng.randrange(2, 5)):
        sample = positive(rng, kind)
        offset = len(text)
        gold += [(start + offset, end + offset, kind) for start, end, kind in sample.gold]
        text += sample.text + rng.choice(["\n", "\n\n", "\n— "])
    return Sample(text, tuple(gold), "mixed", "mixed")


def negative(rng: random.Random) -> Sample:
    texts = [rng.choice(NEGATIVES)(rng) for _ in range(rng.randrange(1, 4))]
    return Sample(" ".join(texts), (), "negative", "negative")


def corpus(count: int, seed: int = 7) -> list[Sample]:
    """`count` texts: one half with one value, a tenth with several, the rest with none."""
    rng = random.Random(seed)
    samples: list[Sample] = []
    for number in range(count):
        share = number % 10
        if share < 6:
            samples.append(positive(rng, KINDS[(number // 10 * 6 + share) % len(KINDS)]))
        else:
            samples.append(mixed(rng) if share == 6 else negative(rng))
    return samples
