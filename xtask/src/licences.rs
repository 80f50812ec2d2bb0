//! Licences and sources of everything that is built in, against `deny.toml`
//!
//! An `Expression` is an SPDX licence expression; a package passes if the list
//! in `deny.toml` satisfies it. The check is done here so that it runs the same
//! on every machine, with no further tool to install and no network.

use std::fs;

use anyhow::{Context, Result, bail, ensure};
use cargo_metadata::{CargoOpt, MetadataCommand, Package};
use serde::Deserialize;

use crate::checkout;

/// The part of `deny.toml` that is checked here.
#[derive(Deserialize)]
struct Rules {
    graph: Graph,
    licenses: Licences,
}

#[derive(Deserialize)]
struct Graph {
    targets: Vec<String>,
}

#[derive(Deserialize)]
struct Licences {
    allow: Vec<String>,
}

/// Checks every package that the lock file builds for the targets in `deny.toml`.
///
/// # Errors
/// If a package has no licence, one outside the list, or comes from anywhere but
/// the default registry or this workspace.
pub(crate) fn check() -> Result<()> {
    let path = checkout::root().join("deny.toml");
    let text = fs::read_to_string(&path).context("cannot read deny.toml")?;
    let rules: Rules = toml::from_str(&text).context("deny.toml is not what this check reads")?;
    let mut command = MetadataCommand::new();
    command.current_dir(checkout::root()).features(CargoOpt::AllFeatures);
    let platforms = rules.graph.targets.iter();
    let options = platforms.map(|target| format!("--filter-platform={target}"));
    let metadata = command.other_options(options.collect::<Vec<_>>()).exec()?;
    let built = metadata.resolve.context("cargo metadata gave no graph")?;
    let mut wrong = Vec::new();
    for node in &built.nodes {
        let package = metadata.packages.iter().find(|one| one.id == node.id);
        let package = package.context("a package of the graph is not described")?;
        if let Err(reason) = allowed(package, &rules.licenses.allow) {
            wrong.push(format!("{} {}: {reason:#}", package.name, package.version));
        }
    }
    if !wrong.is_empty() {
        bail!(
            "not allowed by deny.toml; choose another package or extend the list:\n  {}",
            wrong.join("\n  ")
        );
    }
    Ok(())
}

fn allowed(package: &Package, allow: &[String]) -> Result<()> {
    let is_default = |source: &cargo_metadata::Source| source.is_crates_io();
    ensure!(
        package.source.as_ref().is_none_or(is_default),
        "it comes from neither the default registry nor this workspace"
    );
    let licence = package.license.as_deref().context("it names no licence")?;
    ensure!(satisfied(licence, allow)?, "its licence `{licence}` is not satisfied by the list");
    Ok(())
}

/// Whether the licences in `allow` satisfy the SPDX expression `licence`.
fn satisfied(licence: &str, allow: &[String]) -> Result<bool> {
    // The registry still holds expressions written with a slash for OR.
    let spaced = licence.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut expression = Expression { words: &words, allow };
    let result = expression.any()?;
    ensure!(expression.words.is_empty(), "cannot read licence `{licence}`");
    Ok(result)
}

/// What is left to read of an expression. `AND` binds tighter than `OR`.
struct Expression<'a> {
    words: &'a [&'a str],
    allow: &'a [String],
}

impl Expression<'_> {
    fn any(&mut self) -> Result<bool> {
        let mut result = self.all()?;
        while self.take("OR") {
            result |= self.all()?;
        }
        Ok(result)
    }

    fn all(&mut self) -> Result<bool> {
        let mut result = self.one()?;
        while self.take("AND") {
            result &= self.one()?;
        }
        Ok(result)
    }

    fn one(&mut self) -> Result<bool> {
        if self.take("(") {
            let result = self.any()?;
            ensure!(self.take(")"), "a licence expression lacks a parenthesis");
            return Ok(result);
        }
        let name = self.next()?.to_owned();
        let full = if self.take("WITH") { format!("{name} WITH {}", self.next()?) } else { name };
        Ok(self.allow.contains(&full))
    }

    fn next(&mut self) -> Result<&str> {
        let (first, rest) = self.words.split_first().context("a licence expression ends early")?;
        self.words = rest;
        Ok(first)
    }

    fn take(&mut self, word: &str) -> bool {
        match self.words.split_first() {
            Some((first, rest)) if *first == word => {
                self.words = rest;
                true
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_built_in_is_allowed() {
        if let Err(error) = check() {
            panic!("{error:#}");
        }
    }

    #[track_caller]
    fn expression(licence: &str, expected: Option<bool>) {
        let allow = ["MIT", "Unicode-3.0", "A WITH exception"].map(str::to_owned);
        assert_eq!(satisfied(licence, &allow).ok(), expected, "{licence}");
    }

    #[test]
    fn expressions_are_read_as_spdx_reads_them() {
        expression("MIT", Some(true));
        expression("GPL-2.0", Some(false));
        expression("MIT OR GPL-2.0", Some(true));
        expression("GPL-2.0/MIT", Some(true));
        expression("MIT AND GPL-2.0", Some(false));
        expression("(MIT OR GPL-2.0) AND Unicode-3.0", Some(true));
        expression("GPL-2.0 AND X OR MIT", Some(true));
        expression("GPL-2.0 AND (X OR MIT)", Some(false));
        expression("A WITH exception", Some(true));
        expression("A", Some(false));
        expression("MIT OR", None);
        expression("(MIT", None);
        expression("MIT MIT", None);
        expression("", None);
    }
}
