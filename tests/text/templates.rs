//! What chat templates may use beyond what the golden ones do, with the text transformers gives.

use deltapool::text::{Chat, ChatTemplate, TextError, TextFiles};
use serde_json::{Map, Value, json};

fn template(source: &str) -> Result<ChatTemplate, TextError> {
    ChatTemplate::from_files(&TextFiles {
        tokenizer_config: Some(br#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}"#.into()),
        chat_template: Some(source.as_bytes().to_vec().into()),
        ..TextFiles::default()
    })
}

fn render(source: &str, variables: Value) -> Result<String, TextError> {
    let messages = [json!({"role": "user", "content": "Hi", "none": null, "n": 1.0})];
    let variables = variables.as_object().cloned().unwrap_or_default();
    template(source)?.render(&Chat {
        messages: &messages,
        tools: None,
        add_generation_prompt: true,
        variables: &variables,
    })
}

#[test]
fn templates_render_as_in_python() {
    let value = json!({"v": {"b": "<é'>", "a": [1, true, null, 2.0]}, "on": true});
    // Right-hand sides are what transformers.apply_chat_template prints.
    for (source, expected) in [
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|", "<s>|</s>||"),
        ("{{ messages[0].none }} {{ messages[0].n }} {{ on }} {{ missing }}", "None 1.0 True "),
        ("{{ v }}", "{'b': \"<é'>\", 'a': [1, True, None, 2.0]}"),
        ("{{ v.a[1] | string }}{{ v.a[2] | string }}", "TrueNone"),
        ("{{ v | tojson }}", r#"{"b": "<é'>", "a": [1, true, null, 2.0]}"#),
        (
            "{{ v | tojson(ensure_ascii=True, sort_keys=true) }}",
            r#"{"a": [1, true, null, 2.0], "b": "<\u00e9'>"}"#,
        ),
        ("{{ v.a | tojson(separators=(',', ':')) }}", "[1,true,null,2.0]"),
        ("{{ v.a | tojson(indent=1) }}", "[\n 1,\n true,\n null,\n 2.0\n]"),
        ("{% for m in messages[::-1] %}{{ m.role }}{% endfor %}", "user"),
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "02",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for k, x in v.items() %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "2",
        ),
        ("{{ ' a b '.strip().split(' ')[-1].upper() }}{{ 'x'.startswith('x') }}", "BTrue"),
        ("{{ v.get('zz', 'none') }}{{ 'b' in v }}{{ v.b is string }}", "noneTrueTrue"),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("  {% if on %}\n  x\n  {% endif %}\ny\n", "  x\ny"),
        ("{% if on %}a{% else %}b{% endif %}{{ '%%' + strftime_now('%%') }}", "a%%%"),
        ("{{ '<' }}{{ '&' | safe }}", "<&"),
    ] {
        assert_eq!(render(source, value.clone()).expect(source), expected, "{source}");
    }
}

#[test]
fn template_errors_say_where() {
    for (source, expected) in [
        (
            "a\n{% if %}",
            "chat template: syntax error: unexpected end of block (in chat_template.jinja:2)",
        ),
        (
            "a\n\n{{ x.y.z }}",
            "chat template: undefined value: `x` is undefined (in chat_template.jinja:3)",
        ),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% macro m() %}{{ raise_exception('no') }}{% endmacro %}{{ m() }}", "no"),
        (
            "{{ 1 | tojson(indent=none, color=1) }}",
            "chat template: too many arguments: unknown keyword argument 'color' (in chat_template.jinja:1)",
        ),
        (
            "{{ missing | tojson }}",
            "chat template: undefined value: tojson of an undefined value (in chat_template.jinja:1)",
        ),
        (
            "{{ strftime_now('%Q') }}",
            "chat template: invalid operation: strftime: %Q is not supported (in chat_template.jinja:1)",
        ),
    ] {
        let error = render(source, Value::Null).expect_err(source);
        assert_eq!(error.to_string(), expected, "{source}");
    }
    let error = render("x", json!({"messages": []})).expect_err("reserved");
    assert_eq!(
        error.to_string(),
        "chat template: the variable messages cannot be set, it is part of the chat"
    );
}

#[test]
fn named_templates_are_chosen_by_tools() {
    let from_config = |config: Value| {
        ChatTemplate::from_files(&TextFiles {
            tokenizer_config: Some(config.to_string().into_bytes().into()),
            ..TextFiles::default()
        })
    };
    let list = json!({"chat_template": [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools | length }} tools"},
        {"name": "rag", "template": "{{ documents }}"},
    ]});
    let template = from_config(list).expect("the templates compile");
    let tools = [json!({"name": "f"})];
    for (tools, expected) in [(None, "plain"), (Some(&tools[..]), "with 1 tools")] {
        let chat =
            Chat { messages: &[], tools, add_generation_prompt: false, variables: &Map::new() };
        assert_eq!(template.render(&chat).expect("it renders"), expected);
    }
    for (config, expected) in [
        (
            json!({}),
            "the model has no chat template: neither chat_template.jinja nor chat_template in tokenizer_config.json",
        ),
        (
            json!({"chat_template": null}),
            "the model has no chat template: neither chat_template.jinja nor chat_template in tokenizer_config.json",
        ),
        (
            json!({"chat_template": 3}),
            "tokenizer_config.json: chat_template: is neither a string nor a list",
        ),
        (
            json!({"chat_template": [{"name": "rag", "template": ""}]}),
            "tokenizer_config.json: chat_template: has no template named default",
        ),
        (
            json!({"chat_template": [{"name": "default"}]}),
            "tokenizer_config.json: chat_template[0]: has no name or no template",
        ),
        (
            json!({"chat_template": "{{ x"}),
            "chat template: syntax error: unexpected end of input, expected end of variable block (in tokenizer_config.json chat_template:1)",
        ),
        (
            json!({"chat_template": "x", "bos_token": 3}),
            "tokenizer_config.json: bos_token: is neither a string nor has a content",
        ),
    ] {
        let error =
            from_config(config.clone()).err().unwrap_or_else(|| panic!("{config} is taken"));
        assert_eq!(error.to_string(), expected, "{config}");
    }
}

/// APIs hold the arguments of a call as a string. A template that asks for strings gets it as it is,
/// so that a model reads what it wrote; any other gets the object.
#[test]
fn arguments_of_calls_are_what_the_template_takes() {
    let messages = [
        json!({"role": "user", "content": "Hi"}),
        json!({"role": "assistant", "content": null, "reasoning_content": "So.", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"b\":1,\"a\":[2.0]}"}},
            {"name": "g", "arguments": "no JSON"},
        ]}),
        json!({"role": "tool", "tool_call_id": "c1", "content": "3"}),
    ];
    let calls = "{% for m in messages %}{{ m.reasoning_content }}{{ m.tool_call_id }}{% for c in m.tool_calls or [] %}\
                 {% set c = c.function or c %}[ARGUMENTS]{% endfor %}{% endfor %}";
    for (arguments, expected) in [
        ("{{ c.arguments | tojson }}", "So.{\"b\": 1, \"a\": [2.0]}\"no JSON\"c1"),
        (
            "{% if c.arguments is string %}{{ c.arguments }}{% else %}{{ c.arguments | tojson }}{% endif %}",
            "So.{\"b\":1,\"a\":[2.0]}no JSONc1",
        ),
    ] {
        let template = template(&calls.replace("[ARGUMENTS]", arguments)).expect("it compiles");
        let variables = &Map::new();
        let chat =
            Chat { messages: &messages, tools: None, add_generation_prompt: false, variables };
        assert_eq!(template.render(&chat).expect("it renders"), expected);
    }
}

#[test]
fn the_last_message_may_be_left_open() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ (m.content if m.content is string else \
                  m.content[-1].text if m.content else '') | trim }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let template = template(source).expect("it compiles");
    let render = |messages: &[Value]| {
        let variables = &Map::new();
        let chat = Chat { messages, tools: None, add_generation_prompt: true, variables };
        template.render_open(&chat).map_err(|error| error.to_string())
    };
    let user = json!({"role": "user", "content": "One, two"});
    let told =
        |content: Value| render(&[user.clone(), json!({"role": "assistant", "content": content})]);
    let begun = "<user>One, two</><assistant>";
    assert_eq!(told("One, two".into()), Ok(format!("{begun}One, two")));
    assert_eq!(told(" three ".into()), Ok(format!("{begun}three")));
    assert_eq!(told(json!([{"type": "text", "text": "four"}])), Ok(format!("{begun}four")));
    let nothing = Err("the last message has no text that the model could continue".to_owned());
    assert_eq!(told(" ".into()), nothing);
    assert_eq!(told(Value::Null), nothing);
    assert_eq!(render(&[]), nothing);
}
