//! What is code in a Rust file, and what is comment or literal
//!
//! `code_only` gives the file back with every comment and the inside of every
//! literal blanked out, line for line, so that rules can look for words without
//! being fooled by prose.

/// `text` with comments and the insides of literals replaced by spaces.
pub(super) fn code_only(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let (skipped, kept) = token(rest, first, code.chars().next_back());
        let (now, later) = rest.split_at(skipped);
        if kept {
            code.push_str(now);
        } else {
            let blank = |letter| if letter == '\n' { '\n' } else { ' ' };
            code.extend(now.chars().map(blank));
        }
        rest = later;
    }
    code
}

/// Lines of code that are not tests: no blank lines, comments, or items under `#[cfg(test)]`.
pub(super) fn code_lines(text: &str) -> usize {
    let code = code_only(text);
    let mut lines = code.lines();
    let mut count = 0;
    while let Some(line) = lines.next() {
        if line.starts_with("#[cfg(test)]") {
            // The file is formatted, so the item ends at the first line that closes at the margin.
            lines.find(|line| {
                line.starts_with('}') || (!line.starts_with(' ') && line.ends_with(';'))
            });
        } else if !line.trim().is_empty() {
            count += 1;
        }
    }
    count
}

/// Whether `word` stands alone somewhere in `code`.
pub(super) fn has_word(code: &str, word: &str) -> bool {
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
    code.match_indices(word).any(|(start, _)| {
        let before = code.get(..start).and_then(|part| part.chars().next_back());
        let after = code.get(start + word.len()..).and_then(|part| part.chars().next());
        !before.is_some_and(is_part) && !after.is_some_and(is_part)
    })
}

/// The length in bytes of the token at the start of `rest`, and whether it is code.
fn token(rest: &str, first: char, before: Option<char>) -> (usize, bool) {
    let in_word = before.is_some_and(|letter| letter.is_alphanumeric() || letter == '_');
    let found = match first {
        '/' if rest.starts_with("//") => Some(rest.find('\n').unwrap_or(rest.len())),
        '/' if rest.starts_with("/*") => Some(block_comment(rest)),
        '"' => Some(quoted(rest, 1, '"')),
        'b' | 'c' | 'r' if !in_word => prefixed_string(rest),
        '\'' => character(rest),
        _ => None,
    };
    found.map_or((first.len_utf8(), true), |length| (length, false))
}

/// The length of a block comment, which may hold others.
fn block_comment(rest: &str) -> usize {
    let mut depth = 0_usize;
    let mut position = 0;
    while let Some(tail) = rest.get(position..).filter(|tail| !tail.is_empty()) {
        if tail.starts_with("/*") {
            depth += 1;
            position += 2;
        } else if tail.starts_with("*/") {
            depth -= 1;
            position += 2;
            if depth == 0 {
                return position;
            }
        } else {
            position += tail.chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

/// The length of a literal that opens in the first `opening` bytes and closes at a bare `end`.
fn quoted(rest: &str, opening: usize, end: char) -> usize {
    let mut escaped = false;
    for (position, letter) in rest.char_indices().skip_while(|(at, _)| *at < opening) {
        if escaped {
            escaped = false;
        } else if letter == '\\' {
            escaped = true;
        } else if letter == end {
            return position + 1;
        }
    }
    rest.len()
}

/// The length of a byte, C or raw string, or of a byte literal, if one starts here.
fn prefixed_string(rest: &str) -> Option<usize> {
    let letters = rest.len() - rest.trim_start_matches(['b', 'c', 'r']).len();
    let prefix = rest.get(..letters)?;
    let tail = rest.get(letters..)?;
    if !matches!(prefix, "b" | "c" | "r" | "br" | "cr") {
        return None;
    }
    if prefix == "b" && tail.starts_with('\'') {
        return Some(letters + quoted(tail, 1, '\''));
    }
    if !prefix.ends_with('r') {
        return tail.starts_with('"').then(|| letters + quoted(tail, 1, '"'));
    }
    let hashes = tail.len() - tail.trim_start_matches('#').len();
    let body = tail.get(hashes..)?.strip_prefix('"')?;
    let closing = format!("\"{}", "#".repeat(hashes));
    let inside = body.find(&closing).map_or(body.len(), |at| at + closing.len());
    Some(letters + hashes + 1 + inside)
}

/// The length of a character literal, or `None` for a lifetime.
fn character(rest: &str) -> Option<usize> {
    let mut letters = rest.chars().skip(1);
    let (first, second) = (letters.next()?, letters.next());
    (first == '\\' || second == Some('\'')).then(|| quoted(rest, 1, '\''))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn words(text: &str, expected: &str) {
        let code = code_only(text);
        let joined = code.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(joined, expected, "{text}");
        assert_eq!(code.lines().count(), text.lines().count(), "{text}");
    }

    #[test]
    fn comments_and_literals_are_not_code() {
        words("a // b\nc", "a c");
        words("a /* b /* c */ d\n */ e", "a e");
        words("a(\"b \\\" c\") d", "a( ) d");
        words("r#\"a \" b\"# c", "c");
        words("br\"a\" b\"c\" c\"d\" e", "e");
        words("let a = '\"'; b", "let a = ; b");
        words("let a = '\\''; b", "let a = ; b");
        words("fn a<'b>(c: &'b str) {}", "fn a<'b>(c: &'b str) {}");
        words("b'\\'' c", "c");
        words("bar b r", "bar b r");
        words("\"never closed", "");
    }

    #[test]
    fn tests_comments_and_blank_lines_do_not_count() {
        assert_eq!(code_lines("//! a\n\nfn b() {}\n// c\nfn d() {\n}\n"), 3);
        assert_eq!(code_lines("a;\n#[cfg(test)]\nmod tests {\n    b;\n}\nc;\n"), 2);
        assert_eq!(code_lines("a;\n#[cfg(test)]\nmod tests;\nc;\n"), 2);
    }

    #[test]
    fn a_word_stands_alone() {
        assert!(has_word("pub unsafe fn", "unsafe"));
        assert!(has_word("#[unsafe(no_mangle)]", "unsafe"));
        assert!(!has_word("#![forbid(unsafe_code)]", "unsafe"));
    }
}
