//! The words after `-append`: `case=NAME key=value ...`.
//!
//! Words are parted by white space. The first word with a key counts. What follows the
//! word `--` is for a guest, and is not looked at here.

use core::fmt;

/// The word between the testbed's words and its guest's.
const SEPARATOR: &str = "--";

/// The command line the loader passed.
#[derive(Clone, Copy, Debug)]
pub struct CommandLine<'a>(&'a str);

/// A value that is not the number it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotANumber<'a> {
    /// The key whose value it is.
    pub key: &'a str,
    /// What was there instead.
    pub value: &'a str,
}

impl fmt::Display for NotANumber<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, value } = self;
        write!(f, "{key}={value} is not a decimal or 0x number of 64 bits")
    }
}

impl core::error::Error for NotANumber<'_> {}

impl<'a> CommandLine<'a> {
    /// The command line with this text.
    #[must_use]
    pub const fn new(text: &'a str) -> Self {
        Self(text)
    }

    /// The value of the first word `key=value`; it may be empty.
    #[must_use]
    pub fn get(self, key: &str) -> Option<&'a str> {
        self.0
            .split_ascii_whitespace()
            .take_while(|word| *word != SEPARATOR)
            .filter_map(|word| word.split_once('='))
            .find_map(|(name, value)| (name == key).then_some(value))
    }

    /// What follows the word `--` and one blank: the command line of a guest.
    #[must_use]
    pub fn for_guest(self) -> &'a str {
        let mut starts = self.0.match_indices(SEPARATOR).map(|(start, _)| self.0.split_at(start));
        let is_blank = |byte: Option<u8>| byte.is_none_or(|byte| byte.is_ascii_whitespace());
        starts
            .find_map(|(before, found)| {
                let after = found.get(SEPARATOR.len()..)?;
                let whole = is_blank(before.bytes().last()) && is_blank(after.bytes().next());
                whole.then(|| after.get(1..).unwrap_or(""))
            })
            .unwrap_or("")
    }

    /// The number given for `key`, decimal or after `0x`; `default` if none is given.
    ///
    /// # Errors
    /// [`NotANumber`] if the value is anything else, or does not fit 64 bits.
    pub fn number(self, key: &'a str, default: u64) -> Result<u64, NotANumber<'a>> {
        let Some(value) = self.get(key) else {
            return Ok(default);
        };
        let (digits, radix) = match value.strip_prefix("0x") {
            Some(digits) => (digits, 16),
            None => (value, 10),
        };
        // `from_str_radix` would take a leading plus sign.
        if digits.starts_with('+') {
            return Err(NotANumber { key, value });
        }
        u64::from_str_radix(digits, radix).map_err(|_| NotANumber { key, value })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &'static str, value: Option<&str>, number: Result<u64, ()>) {
        let line = CommandLine::new(text);
        assert_eq!(line.get("n"), value);
        assert_eq!(line.number("n", 5).map_err(|_| ()), number);
    }

    #[test]
    fn a_key_has_the_value_of_its_first_word() {
        check("", None, Ok(5));
        check("case=n nn=1 n", None, Ok(5));
        check("n=3", Some("3"), Ok(3));
        check("  x=1\tn=3  n=4 ", Some("3"), Ok(3));
        check("n=0x1F", Some("0x1F"), Ok(31));
        check("n=18446744073709551615", Some("18446744073709551615"), Ok(u64::MAX));
        check("n=a=b", Some("a=b"), Err(()));
    }

    #[test]
    fn a_value_that_is_no_number_is_an_error_and_not_the_default() {
        check("n=", Some(""), Err(()));
        check("n=0x", Some("0x"), Err(()));
        check("n=+3", Some("+3"), Err(()));
        check("n=-3", Some("-3"), Err(()));
        check("n=18446744073709551616", Some("18446744073709551616"), Err(()));
    }

    #[test]
    fn the_words_of_a_guest_are_its_own() {
        let line = CommandLine::new("case=guest a=1 -- a=2  b=3 -- c --d");
        assert_eq!(line.for_guest(), "a=2  b=3 -- c --d");
        assert_eq!((line.get("a"), line.get("b")), (Some("1"), None));
        for (text, expected) in
            [("", ""), ("a --b", ""), ("a--", ""), ("a --", ""), ("-- ", ""), ("-- x", "x")]
        {
            assert_eq!(CommandLine::new(text).for_guest(), expected, "{text:?}");
        }
    }
}
