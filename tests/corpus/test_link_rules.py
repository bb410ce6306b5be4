"""Rules for links: which are normalized, and which are dropped."""

import pytest

from meshtrain.corpus.web.link_rules import LinkRules, load_rules
from meshtrain.errors import DataError

GOOD = {
    "http://example.org": "http://example.org/",
    "HTTPS://Example.ORG:443/A?b=C#d": "https://example.org/A?b=C",
    "http://example.org:8080/a": "http://example.org:8080/a",
    "http://127.0.0.1:80/a": "http://127.0.0.1/a",
    "http://[::1]:8080/a": "http://[::1]:8080/a",
    "http://localhost/a": "http://localhost/a",
    "http://bücher.example/ä": "http://xn--bcher-kva.example/ä",
    "http://example.org/page.html": "http://example.org/page.html",
    "http://example.org/v1.5/pdf": "http://example.org/v1.5/pdf",
    "http://notimgur.com/": "http://notimgur.com/",
}
BAD = {
    "http://a": "too short",
    "example.org/page": "malformed",
    "ftp://example.org/": "malformed",
    "http://example": "malformed",
    "http://exa mple.org/": "malformed",
    "http://example.org/\x07": "malformed",
    "http://-example-.org/": "malformed",
    "http://example..org/": "malformed",
    "http://example.org:port/": "malformed",
    "http://me:secret@example.org/": "malformed",
    "http://1.2.3.999/": "malformed",
    "http://[::1/": "malformed",
    "http://\\xff.example.org/": "malformed",
    "http://imgur.com/": "blacklisted domain",
    "https://i.imgur.co.uk/gallery": "blacklisted domain",
    "http://youtu.be/abc": "blacklisted domain",
    "http://docs.google.com/x": "blacklisted domain",
    "http://example.org/a.PDF?x=1": "blacklisted extension",
    "http://example.org/a.tar.gz": "blacklisted extension",
}


@pytest.mark.parametrize("link", GOOD)
def test_a_good_link_is_normalized(link):
    assert LinkRules().normalize(link) == (GOOD[link], None)


@pytest.mark.parametrize("link", BAD, ids=repr)
def test_a_bad_link_has_a_reason(link):
    assert LinkRules().normalize(link)[1] == BAD[link]


def test_lists_of_the_user_replace_the_built_in_ones(tmp_path):
    domains, endings = tmp_path / "domains", tmp_path / "endings"
    domains.write_text("# mine\nExample.ORG  # all of it\n\nboring\n")
    endings.write_text("html\n.txt\n")
    rules = load_rules(str(domains), str(endings))

    assert rules.normalize("http://www.example.org/")[1] == "blacklisted domain"
    assert rules.normalize("http://boring.net/")[1] == "blacklisted domain"
    assert rules.normalize("http://example.com/a.html")[1] == "blacklisted extension"
    assert rules.normalize("http://example.com/a.txt")[1] == "blacklisted extension"
    assert rules.normalize("http://imgur.com/a.jpg")[1] is None


def test_an_unreadable_blacklist_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"^urls.blacklisted_domains: cannot read .*: No such file or directory; fix"):
        load_rules(str(tmp_path / "none"), None)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"^urls.blacklisted_extensions: cannot read .*latin: .*codec.*; fix it$"):
        load_rules(None, str(tmp_path / "latin"))
