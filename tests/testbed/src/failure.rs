//! Why a case failed, in words, without a heap.
//!
//! A `Failure` is a sentence of bounded length. Every typed error turns into one with
//! `?`, and [`Context`] says what was being tried.

use core::fmt::{self, Write};

use arrayvec::ArrayString;

/// The longest sentence kept, in bytes; what does not fit is cut off.
const LENGTH: usize = 320;

/// The reason for a failed case.
pub struct Failure {
    text: ArrayString<LENGTH>,
}

/// A writer that keeps what fits and drops the rest.
struct Cut<'a>(&'a mut ArrayString<LENGTH>);

impl Write for Cut<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.chars().try_for_each(|character| {
            // A reason is one line of serial output, whatever went into it.
            let shown = if character.is_control() { ' ' } else { character };
            self.0.try_push(shown).map_err(|_| fmt::Error)
        })
    }
}

impl Failure {
    /// The failure with this reason, cut to 320 bytes and to one line.
    #[must_use]
    pub fn new(reason: fmt::Arguments<'_>) -> Self {
        let mut text = ArrayString::new();
        // An error here means that the rest was cut off, which is the documented result.
        if Cut(&mut text).write_fmt(reason).is_err() && text.is_empty() {
            text.push_str("no reason given");
        }
        Self { text }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<E: core::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::new(format_args!("{error}"))
    }
}

/// Say what was being tried when a step failed.
pub trait Context<T> {
    /// The value, or a failure that names `what` and shows the error.
    ///
    /// # Errors
    /// When `self` holds no value.
    fn context(self, what: &str) -> Result<T, Failure>;
}

impl<T, E: fmt::Debug> Context<T> for Result<T, E> {
    fn context(self, what: &str) -> Result<T, Failure> {
        self.map_err(|error| Failure::new(format_args!("{what}: {error:?}")))
    }
}

impl<T> Context<T> for Option<T> {
    fn context(self, what: &str) -> Result<T, Failure> {
        self.ok_or_else(|| Failure::new(format_args!("{what}: nothing there")))
    }
}

/// Return a [`Failure`] with a formatted reason.
#[macro_export]
macro_rules! fail {
    ($($reason:tt)*) => {
        return ::core::result::Result::Err($crate::failure::Failure::new(format_args!($($reason)*)))
    };
}

/// Return a [`Failure`] with a formatted reason unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($reason:tt)*) => {
        if !$condition {
            $crate::fail!($($reason)*);
        }
    };
}

#[cfg(test)]
mod tests {
    use std::string::{String, ToString};

    use super::*;

    #[test]
    fn a_long_reason_is_cut_at_a_whole_character() {
        let long = "\u{20ac}".repeat(200);
        let shown = Failure::new(format_args!("{long}")).to_string();
        assert_eq!(shown, "\u{20ac}".repeat(LENGTH / 3));
    }

    #[test]
    fn a_reason_stays_on_one_line() {
        let shown = Failure::new(format_args!("a\nPASS b\r")).to_string();
        assert_eq!(shown, "a PASS b ");
    }

    #[test]
    fn a_typed_error_and_its_context_are_both_shown() {
        let result: Result<(), u8> = Err(7);
        let shown = result.context("attach").map_err(|failure| failure.to_string());
        assert_eq!(shown, Err(String::from("attach: 7")));
        let nothing: Option<()> = None;
        let shown = nothing.context("DMAR").map_err(|failure| failure.to_string());
        assert_eq!(shown, Err(String::from("DMAR: nothing there")));
    }

    #[test]
    fn ensure_returns_only_when_the_condition_is_false() {
        fn below_three(number: u8) -> Result<u8, Failure> {
            ensure!(number < 3, "{number} is too big");
            Ok(number)
        }
        assert_eq!(below_three(2).map_err(|failure| failure.to_string()), Ok(2));
        assert_eq!(
            below_three(3).map_err(|failure| failure.to_string()),
            Err(String::from("3 is too big"))
        );
    }
}
