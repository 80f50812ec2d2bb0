//! The story of a scenario in words.

use crate::{Manner, parse::Script, run};

/// Tells what a file is about, what happens in it, and how that ends on the model.
#[must_use]
pub fn explain(script: &Script) -> String {
    let scenario = &script.scenario;
    let mut text = format!("{}\n", scenario.title);
    if let Some(bug) = &scenario.bug {
        text += &format!("Report: {bug}\n");
    }
    if !scenario.kinds.is_empty() {
        text += &format!("Kinds of fault: {}\n", scenario.kinds.join(", "));
    }
    if let Some(source) = &scenario.source {
        text += &format!("Source: {source}\n");
    }
    if let Some(about) = &scenario.about {
        text += &format!("\n{}\n", about.trim());
    }
    text += "\nSteps:\n";
    for step in &script.steps {
        let actor = step.actor.and_then(|actor| script.actors.get(actor));
        let actor = actor.map(|actor| format!("{actor}: ")).unwrap_or_default();
        let note = step.note.as_ref().map(|note| format!(" ({note})")).unwrap_or_default();
        text += &format!("  line {:>3}  {actor}{}{note}\n", step.line, step.action.name());
    }
    let bound = scenario.bound.get_ref();
    text += &format!(
        "\nAt most {} flushes of CPUs and {} of devices may be asked for.\n",
        bound.tlb, bound.iotlb
    );
    let verdict = run(script, Manner { once: true, ..Manner::default() });
    text += "\nWhat happens, in the first order of steps:\n";
    let story = verdict.broken.as_ref().map_or(&verdict.story, |broken| &broken.story);
    for line in story {
        text += &format!("  {line}\n");
    }
    match &verdict.broken {
        None => text += "It ends as the file says.\n",
        Some(broken) => {
            text += &format!("It breaks at line {}: {}\n", broken.line, broken.text);
        }
    }
    text
}
