//! What a waiting person sees on standard error
//!
//! A `Steps` is a bar on a terminal and one plain line per step anywhere else,
//! so that a log stays readable and standard output stays free for results.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A known number of steps, each with a name.
pub(crate) struct Steps {
    bar: ProgressBar,
    what: &'static str,
}

impl Steps {
    /// Starts `count` steps of the work called `what`.
    pub(crate) fn new(what: &'static str, count: usize) -> Self {
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        let bar = ProgressBar::with_draw_target(Some(count), ProgressDrawTarget::stderr());
        if let Ok(style) =
            ProgressStyle::with_template("{spinner} {prefix} {pos}/{len} {msg} ({elapsed})")
        {
            bar.set_style(style);
        }
        bar.set_prefix(what);
        bar.enable_steady_tick(Duration::from_millis(120));
        Self { bar, what }
    }

    /// Announces the step that begins now.
    pub(crate) fn begin(&self, name: &str) {
        if self.bar.is_hidden() {
            eprintln!("{}: {name}", self.what);
        } else {
            self.bar.set_message(name.to_owned());
        }
    }

    /// Counts one step as done.
    pub(crate) fn end(&self) {
        self.bar.inc(1);
    }

    /// Prints a line of results on standard output without tearing the bar.
    pub(crate) fn print(&self, line: &str) {
        self.bar.suspend(|| println!("{line}"));
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
