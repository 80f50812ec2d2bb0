//! Scenarios as the testbed gets them: a step a line, numbers for all names.
//!
//! A [`Line`] is the number of the step in its file, a word, and what belongs to it. The
//! runner writes such a text from a scenario file and passes it as the first boot module.

use core::fmt;

use arrayvec::ArrayVec;

/// Pages and mappings that one scenario can name.
pub const NAMES: usize = 2048;
/// Numbers in one line.
pub const VALUES: usize = 8;
/// Stands for a status that may be anything. Any other is the 16 bits of the number.
pub const ANY_STATUS: u64 = 0x8000;
/// Stands for no page, or no limit.
pub const NONE: u64 = u64::MAX;
/// Stands for whatever page it is.
pub const ANY: u64 = u64::MAX - 1;
/// The number of the first device; the processors have the numbers below.
pub const DEVICES: u64 = 16;
/// Frame numbers that one processor's guest can be told to reach.
pub const PLACES: usize = 6;
/// The first line of such a text.
pub const HEAD: &str = "quiesce-scenario 2";

/// What happens when no boot module was passed: two grants, mapped and given back.
pub const BUILT_IN: &str = "quiesce-scenario 2
0 cpu 1 2
0 queues 2
0 caller 2
0 enter 1 2
0 mark
1 grant 0 1 8 2 0
1 grant 1 1 9 2 0
2 map 0 0 0x100000 0 0 2
2 map 1 1 0x100001 0 0 2
2 call-map 2 0
2 asked 0 0 0 1
3 reaches 1 0x100000 0 1
3 reaches 1 0x100001 1 1
3 reaches 16 0x100000 0 1
3 reaches 16 0x100001 1 1
4 unmap 0 0
4 unmap 1 0
4 call-unmap 2 0
4 asked 1 1 1 1
4 kicks 1 1
5 take-back 0 0
5 take-back 1 0
6 reaches 1 0x100000 0xffffffffffffffff 1
6 reaches 1 0x100001 0xffffffffffffffff 1
6 reaches 16 0x100000 0xffffffffffffffff 1
6 reaches 16 0x100001 0xffffffffffffffff 1
";

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line<'t> {
    /// The line of the step in its file.
    pub number: u64,
    /// What it does.
    pub word: &'t str,
    /// With what.
    pub values: ArrayVec<u64, VALUES>,
}

/// A text that is none of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed<'t> {
    /// The first line is another one.
    Head(&'t str),
    /// A number was expected.
    Number(&'t str),
    /// A line ends too early.
    Short(&'t str),
    /// A line goes on too long.
    Long(&'t str),
}

impl fmt::Display for Malformed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Head(line) => write!(f, "`{line}` is not `{HEAD}`"),
            Self::Number(word) => write!(f, "`{word}` is no decimal or 0x number of 64 bits"),
            Self::Short(line) => write!(f, "`{line}` has no number and word"),
            Self::Long(line) => write!(f, "`{line}` has more than {VALUES} numbers"),
        }
    }
}

impl core::error::Error for Malformed<'_> {}

fn number(word: &str) -> Result<u64, Malformed<'_>> {
    let (digits, radix) = match word.strip_prefix("0x") {
        Some(digits) => (digits, 16),
        None => (word, 10),
    };
    // `from_str_radix` would take a leading plus sign.
    let plain = !digits.starts_with('+');
    let value = u64::from_str_radix(digits, radix).ok().filter(|_| plain);
    value.ok_or(Malformed::Number(word))
}

/// Reads one line after the first.
///
/// # Errors
/// [`Malformed`], except [`Malformed::Head`].
pub fn line(text: &str) -> Result<Line<'_>, Malformed<'_>> {
    let mut words = text.split_ascii_whitespace();
    let (Some(first), Some(word)) = (words.next(), words.next()) else {
        return Err(Malformed::Short(text));
    };
    let mut values = ArrayVec::new();
    for word in words {
        values.try_push(number(word)?).map_err(|_| Malformed::Long(text))?;
    }
    Ok(Line { number: number(first)?, word, values })
}

/// The lines of a text, after its first.
///
/// # Errors
/// [`Malformed::Head`]; what is wrong with a line comes in its place.
pub fn lines(
    text: &str,
) -> Result<impl Iterator<Item = Result<Line<'_>, Malformed<'_>>>, Malformed<'_>> {
    let mut lines = text.lines();
    let head = lines.next().unwrap_or("");
    if head != HEAD {
        return Err(Malformed::Head(head));
    }
    Ok(lines.filter(|text| !text.trim().is_empty()).map(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn is(text: &str, expected: Result<(u64, &str, &[u64]), Malformed<'_>>) {
        let found = line(text);
        let found = found.as_ref().map(|line| (line.number, line.word, line.values.as_slice()));
        assert_eq!(found, expected.as_ref().map(|(number, word, list)| (*number, *word, *list)));
    }

    #[test]
    fn a_line_is_a_number_a_word_and_numbers() {
        is("12 reaches 0x100000 3", Ok((12, "reaches", &[0x10_0000, 3])));
        is("  1\tmark ", Ok((1, "mark", &[])));
        is("1", Err(Malformed::Short("1")));
        is("", Err(Malformed::Short("")));
        is("one mark", Err(Malformed::Number("one")));
        is("1 map +3", Err(Malformed::Number("+3")));
        is("1 map 0x", Err(Malformed::Number("0x")));
        is("1 map 99999999999999999999", Err(Malformed::Number("99999999999999999999")));
        let long = "1 map 1 2 3 4 5 6 7 8 9";
        is(long, Err(Malformed::Long(long)));
    }

    #[test]
    fn a_text_begins_with_its_name() {
        assert_eq!(lines("").err(), Some(Malformed::Head("")));
        assert_eq!(
            lines("quiesce-scenario 1\n").err(),
            Some(Malformed::Head("quiesce-scenario 1"))
        );
        let built_in = lines(BUILT_IN).map(|lines| lines.filter(Result::is_ok).count());
        assert_eq!(built_in, Ok(BUILT_IN.lines().count() - 1));
    }
}
