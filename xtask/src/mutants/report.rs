//! What is said about mutants: lines, tables, one JSON object

use anyhow::Result;
use serde::Serialize;

use super::{End, Killer, Mutant};

/// The object of `--json`.
#[derive(Serialize)]
struct Results<'a> {
    total: usize,
    killed: usize,
    survivors: Vec<&'a str>,
}

pub(super) fn survivors<'a>(ends: &[(&'a Mutant, End)]) -> Vec<&'a str> {
    let survived = ends.iter().filter(|(_, end)| *end == End::Survived);
    survived.map(|(mutant, _)| mutant.name).collect()
}

pub(super) fn json(ends: &[(&Mutant, End)]) -> Result<String> {
    let survivors = survivors(ends);
    let killed = ends.len() - survivors.len();
    Ok(serde_json::to_string(&Results { total: ends.len(), killed, survivors })?)
}

/// One mutant that was run.
pub(super) fn line(mutant: &Mutant, end: End, seconds: f32) -> String {
    let how = match end {
        End::Killed => "killed by",
        End::Survived => "SURVIVED",
    };
    format!("{:<26} {how} {} ({seconds:.1} s)", mutant.name, path(&mutant.killer))
}

/// What there is to run.
pub(super) fn names(mutants: &[&Mutant]) -> String {
    let lines = mutants.iter().map(|mutant| format!("{:<26} {}", mutant.name, mutant.file));
    lines.collect::<Vec<_>>().join("\n")
}

/// The table of docs/testing.md.
pub(super) fn markdown<'a>(mutants: impl Iterator<Item = &'a Mutant>) -> String {
    let mut table = String::from("| mutant | file | row | killed by |\n|---|---|---|---|\n");
    for Mutant { name, file, invariant, killer, .. } in mutants {
        table += &format!("| {name} | `{file}` | {invariant} | {} |\n", path(killer));
    }
    table
}

fn path(killer: &Killer) -> String {
    let Killer { folder, target, test } = killer;
    match target {
        None => format!("`{folder}` :: `{test}`"),
        Some(target) => format!("`{folder}/tests/{target}` :: `{test}`"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::list::mutants;
    use super::*;

    #[test]
    fn the_json_object_has_the_promised_keys() {
        let all: Vec<&Mutant> = mutants().collect();
        let [first, second, ..] = all[..] else { panic!("two mutants at least") };
        let ends = [(first, End::Killed), (second, End::Survived)];
        let expected = format!("{{\"total\":2,\"killed\":1,\"survivors\":[\"{}\"]}}", second.name);
        assert_eq!(json(&ends).ok(), Some(expected));
        assert_eq!(survivors(&ends), [second.name]);
    }
}
