//! Scenario files: any text, and files of the corpus with changes here and there.
//!
//! Whatever the text is, reading it ends without a panic. An error names the file and a
//! line of it. What is accepted has steps on lines of the file, in order, and is lowered to
//! a program for QEMU or refused with a reason.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use arbitrary::Arbitrary;
use scenarios::parse::{self, Script};

use crate::script::{self, read};

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    Text(&'a str),
    /// A file of the corpus; the changes follow.
    File(u8),
}

#[derive(Debug, Arbitrary)]
enum Change {
    Remove {
        line: u16,
    },
    Repeat {
        line: u16,
        at: u16,
    },
    /// A line of another file.
    Borrow {
        file: u8,
        line: u16,
        at: u16,
    },
    Number {
        which: u16,
        with: Number,
    },
    /// One word for another of the same file.
    Word {
        which: u16,
        with: u16,
    },
    Character {
        at: u16,
        with: char,
    },
}

#[derive(Debug, Arbitrary)]
enum Number {
    Small(u8),
    Power { of_two: u8, less: bool },
    Any(i64),
}

/// The files of the corpus, by name.
static CORPUS: LazyLock<Vec<(PathBuf, String)>> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios/corpus");
    let files = parse::collect(&[folder]).expect("the corpus is there");
    let texts = files.into_iter().map(|file| {
        let text = fs::read_to_string(&file).expect("a file of the corpus");
        (PathBuf::from(file.file_name().expect("files have names")), text)
    });
    texts.collect()
});

impl Number {
    fn text(&self) -> String {
        match self {
            Self::Small(number) => number.to_string(),
            Self::Power { of_two, less } => {
                ((1_u128 << (of_two % 65)) - u128::from(*less)).to_string()
            }
            Self::Any(number) => number.to_string(),
        }
    }
}

fn corpus(file: u8) -> &'static str {
    &CORPUS[usize::from(file) % CORPUS.len()].1
}

/// Where the longest pieces of `text` are whose characters are all in.
fn pieces(text: &str, is_in: impl Fn(char) -> bool) -> Vec<(usize, usize)> {
    let mut pieces: Vec<(usize, usize)> = Vec::new();
    for (at, character) in text.char_indices().filter(|(_, character)| is_in(*character)) {
        let end = at + character.len_utf8();
        match pieces.last_mut() {
            Some(last) if last.1 == at => last.1 = end,
            _ => pieces.push((at, end)),
        }
    }
    pieces
}

fn replace(text: &mut String, pieces: &[(usize, usize)], which: u16, with: &str) {
    if let Some(&(start, end)) = pieces.get(usize::from(which) % pieces.len().max(1)) {
        text.replace_range(start..end, with);
    }
}

impl Change {
    fn apply(&self, text: &mut String) {
        let mut lines: Vec<&str> = text.lines().collect();
        let wrap = |place: u16, count: usize| usize::from(place) % count.max(1);
        match self {
            Self::Remove { line } if !lines.is_empty() => {
                lines.remove(wrap(*line, lines.len()));
            }
            Self::Repeat { line, at } if !lines.is_empty() => {
                let line = lines[wrap(*line, lines.len())];
                lines.insert(wrap(*at, lines.len() + 1), line);
            }
            Self::Borrow { file, line, at } => {
                let others: Vec<&str> = corpus(*file).lines().collect();
                lines.insert(wrap(*at, lines.len() + 1), others[wrap(*line, others.len())]);
            }
            Self::Number { which, with } => {
                let numbers = pieces(text, |character| character.is_ascii_digit());
                return replace(text, &numbers, *which, &with.text());
            }
            Self::Word { which, with } => {
                let words = pieces(text, |character| character.is_ascii_lowercase());
                let with = words.get(wrap(*with, words.len()));
                let with = with.map_or(String::new(), |&(start, end)| text[start..end].to_owned());
                return replace(text, &words, *which, &with);
            }
            Self::Character { at, with } => {
                let places: Vec<(usize, usize)> = text
                    .char_indices()
                    .map(|(at, character)| (at, at + character.len_utf8()))
                    .collect();
                return replace(text, &places, *at, with.encode_utf8(&mut [0; 4]));
            }
            Self::Remove { .. } | Self::Repeat { .. } => return,
        }
        *text = lines.join("\n") + "\n";
    }
}

/// The text that an input stands for.
pub(crate) fn text(bytes: &[u8]) -> Option<String> {
    let (input, changes) = read::<Input<'_>, Change>(bytes)?;
    Some(match input {
        Input::Text(text) => text.to_owned(),
        Input::File(file) => {
            let mut text = corpus(file).to_owned();
            changes.iter().for_each(|change| change.apply(&mut text));
            text
        }
    })
}

#[track_caller]
fn check(text: &str) -> bool {
    let file = Path::new("made-up.toml");
    // A file without a line break has a line, and an error may lie at its very end.
    let lines = text.matches('\n').count() + 1;
    match parse::parse(file, text) {
        Ok(script) => {
            check_script(&script, lines);
            true
        }
        Err(problem) => {
            let Some((line, column)) = problem.place else {
                panic!("no line is named: {problem}");
            };
            assert!((1..=lines).contains(&line) && column >= 1, "{problem}: {lines} lines");
            let start = format!("made-up.toml:{line}:{column}: ");
            let shown = problem.to_string();
            let what = shown.strip_prefix(&start);
            assert!(what.is_some_and(|what| !what.trim().is_empty()), "{shown:?}");
            assert!(!shown.contains('\n'), "{shown:?}");
            false
        }
    }
}

#[track_caller]
fn check_script(script: &Script, lines: usize) {
    assert!(script.actors.len() <= parse::ACTORS);
    let mut before = 0;
    for step in &script.steps {
        assert!(before <= step.line && (1..=lines).contains(&step.line), "line {}", step.line);
        before = step.line;
        assert!(step.actor.is_none_or(|actor| actor < script.actors.len()));
    }
    if let Err(why) = scenarios::qemu::lower(script) {
        assert!(!why.is_empty());
    }
}

/// Reads any text.
pub(crate) fn check_any(text: &str) {
    // Whether it makes sense is no matter.
    let _: bool = check(text);
}

pub(crate) fn tell(bytes: &[u8]) -> String {
    let Some((input, changes)) = read::<Input<'_>, Change>(bytes) else { return String::new() };
    let text = text(bytes).unwrap_or_default();
    format!("{}---\n{text}\n", script::tell(&input, &changes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_corpus_are_accepted_and_changed_ones_often_are() {
        assert!(CORPUS.iter().all(|(_, text)| check(text)));
        let numbers = (0..40).filter(|which| {
            let mut text = corpus(3).to_owned();
            Change::Number { which: *which, with: Number::Small(1) }.apply(&mut text);
            check(&text)
        });
        assert!(numbers.count() > 0);
        let mut text = corpus(3).to_owned();
        Change::Remove { line: 0 }.apply(&mut text);
        assert!(!check(&text), "a file without its title");
    }
}
